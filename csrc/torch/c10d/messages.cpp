// See messages.h. The thread only looks in every millisecond, and dozes when there has been nothing
// for a while: a send or a receive that is waited for at once must not pay for waking it.
#include "messages.h"

#include <pthread.h>

#include <algorithm>

#include "../../plan/error.h"
#include "binder.h"

namespace pycollect::dist {
namespace {

constexpr std::chrono::milliseconds kTick{1};
constexpr int kTicksAwake = 100;
constexpr auto kForEver = std::chrono::hours(24 * 365);

}  // namespace

Messages::Messages(std::shared_ptr<shm::Group> group)
    : group_(std::move(group)), mailbox_(*group_) {}

c10::intrusive_ptr<MessageWork> Messages::make(const Letter& letter, const char* name,
                                               bool receives) {
  forks_.require_none(name);
  if (letter.peer) check_rank(*letter.peer, group_->world(), name, receives ? "src" : "dst");
  require(!letter.peer || *letter.peer != group_->rank(), name, ": ", receives ? "src" : "dst",
          " is this rank itself");
  require(letter.tag >= 0, name, ": tag is ", letter.tag, "; it must not be negative");
  const Label label{name, "tensor"};
  check_host_tensor(letter.tensor, receives ? Use::write : Use::read, label);
  dtype_of(letter.tensor, label);
  const std::lock_guard lock(mutex_);
  if (closed_) throw CollectiveError(text(name, ": the group has been destroyed"));
  return c10::make_intrusive<MessageWork>(MessageWork::Ask{name, made_++, letter.timeout, receives},
                                          letter.tensor, shared_from_this());
}

c10::intrusive_ptr<c10d::Work> Messages::send(const Letter& letter) {
  auto work = make(letter, "send", false);
  const shm::Envelope envelope = work->envelope(letter.tag);
  work->transfer_ = mailbox_.send(*letter.peer, envelope, work->memory());
  return started(std::move(work));
}

c10::intrusive_ptr<c10d::Work> Messages::receive(const Letter& letter) {
  auto work = make(letter, "recv", true);
  const shm::Envelope envelope = work->envelope(letter.tag);
  work->transfer_ = mailbox_.receive(letter.peer, envelope, work->memory());
  return started(std::move(work));
}

c10::intrusive_ptr<c10d::Work> Messages::started(c10::intrusive_ptr<MessageWork> work) {
  if (work->transfer_->done()) {
    work->settle();
    return work;
  }
  const std::lock_guard lock(mutex_);
  open_.push_back(work);
  if (!thread_.joinable())
    thread_ = std::thread([self = shared_from_this()] { self->serve(); });
  else if (dozes_)
    changed_.notify_all();
  return work;
}

void Messages::wait(MessageWork& work, shm::Deadline deadline) {
  forks_.require_none(work.ask_.name);
  {
    const std::lock_guard lock(mutex_);
    ++waiting_;
  }
  std::exception_ptr error;
  try {
    mailbox_.wait(*work.transfer_, work.occasion(deadline));
  } catch (...) {
    error = std::current_exception();
  }
  {
    const std::lock_guard lock(mutex_);
    --waiting_;
  }
  work.settle();
  forget(work);
  if (error && !work.transfer_->done()) std::rethrow_exception(error);
}

bool Messages::wait_until(MessageWork& work, shm::Deadline deadline) {
  forks_.require_none(work.ask_.name);
  const auto over = [&] { return work.transfer_->done() || shm::Clock::now() >= deadline; };
  while (!over()) mailbox_.work(over, work.occasion(shm::Clock::now() + kForEver));
  work.settle();
  return work.transfer_->done();
}

void Messages::forget(const MessageWork& work) {
  const std::lock_guard lock(mutex_);
  std::erase_if(open_, [&](const auto& w) { return w.get() == &work; });
}

// What others have moved. Callbacks run without the lock.
bool Messages::settle_done(Lock& lock) {
  const auto first = std::stable_partition(open_.begin(), open_.end(),
                                           [](const auto& w) { return !w->transfer_->done(); });
  if (first == open_.end()) return false;
  std::vector<c10::intrusive_ptr<MessageWork>> done(std::make_move_iterator(first),
                                                    std::make_move_iterator(open_.end()));
  open_.erase(first, open_.end());
  lock.unlock();
  for (const auto& w : done) w->settle();
  done.clear();
  lock.lock();
  return true;
}

// Until something is done, or somebody else does it.
void Messages::move_on(Lock& lock) {
  const auto stop = [this] {
    const std::lock_guard hold(mutex_);
    return closed_ || waiting_ > 0 || std::any_of(open_.begin(), open_.end(), [](const auto& w) {
             return w->transfer_->done();
           });
  };
  lock.unlock();
  try {
    mailbox_.work(stop, {"send or recv", 0, shm::Clock::now() + kForEver});
  } catch (const std::exception&) {
    // Everything that was under way has failed with it, and says so itself.
  }
  lock.lock();
}

void Messages::serve() {
  pthread_setname_np(pthread_self(), "pycollect p2p");
  Lock lock(mutex_);
  for (int ticks = 0; !closed_;) {
    if (open_.empty() && ticks >= kTicksAwake) {
      dozes_ = true;
      changed_.wait(lock, [&] { return closed_ || !open_.empty(); });
      dozes_ = false;
      ticks = 0;
    }
    changed_.wait_for(lock, kTick, [&] { return closed_; });
    ++ticks;
    if (!open_.empty()) ticks = 0;
    while (settle_done(lock)) continue;
    if (!closed_ && !open_.empty() && waiting_ == 0) move_on(lock);
  }
}

void Messages::close(std::chrono::milliseconds grace) {
  const auto over = [deadline = shm::Clock::now() + grace] {
    return shm::Clock::now() >= deadline;
  };
  try {
    if (!mailbox_.work(over, {"destroy_process_group", 0, shm::Clock::now() + kForEver}))
      group_->abort("it was destroyed while messages were under way");
    mailbox_.progress();
  } catch (const std::exception&) {
    // The group is broken, and what was under way has failed.
  }
  std::thread thread;
  {
    Lock lock(mutex_);
    closed_ = true;
    changed_.notify_all();
    thread.swap(thread_);
  }
  mailbox_.wake();
  if (thread.joinable()) thread.join();
  Lock lock(mutex_);
  settle_done(lock);
}

}  // namespace pycollect::dist
