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

Messages::Messages(std::shared_ptr<shm::Group> group, std::shared_ptr<const Ladder> ladder)
    : group_(std::move(group)),
      ladder_(std::move(ladder)),
      mailbox_(*group_),
      parcels_(std::make_shared<Parcels>(group_, ladder_)) {
  if (!parcels_->takes_any()) mailbox_.take_no_parcels();
}

bool Messages::check(const Letter& letter, const char* name, bool receives) const {
  forks_.require_none(name);
  if (letter.peer) check_rank(*letter.peer, group_->world(), name, receives ? "src" : "dst");
  require(!letter.peer || *letter.peer != group_->rank(), name, ": ", receives ? "src" : "dst",
          " is this rank itself");
  require(letter.tag >= 0, name, ": tag is ", letter.tag, "; it must not be negative");
  const Label label{name, "tensor"};
  const bool away =
      check_operand(letter.tensor, receives ? Use::write : Use::read, label, ladder_.get());
  dtype_of(letter.tensor, label);
  return away;
}

c10::intrusive_ptr<MessageWork> Messages::make(const Letter& letter, const char* name,
                                               bool receives) {
  const bool away = check(letter, name, receives);
  MessageWork::Ask ask{name, 0, letter.peer, letter.tag, letter.timeout, receives};
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw CollectiveError(text(name, ": the group has been destroyed"));
    ask.number = made_++;
  }
  return c10::make_intrusive<MessageWork>(
      ask, letter.tensor, away ? passage_of(letter, receives) : nullptr, shared_from_this());
}

c10::intrusive_ptr<c10d::Work> Messages::send(const Letter& letter) {
  auto work = make(letter, "send", false);
  dispatch(work);
  return started(std::move(work));
}

c10::intrusive_ptr<c10d::Work> Messages::receive(const Letter& letter) {
  auto work = make(letter, "recv", true);
  post(work);
  return started(std::move(work));
}

c10::intrusive_ptr<c10d::Work> Messages::started(c10::intrusive_ptr<MessageWork> work) {
  if (work->is_moved()) {
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

void Messages::progress() {
  dispatch_arrived();
  mailbox_.progress();
  advance_parcels();
}

void Messages::wait(MessageWork& work, shm::Deadline deadline) {
  forks_.require_none(work.ask_.name);
  {
    const std::lock_guard lock(mutex_);
    ++waiting_;
  }
  std::exception_ptr error;
  try {
    await_dispatch(work, deadline);
    if (handed_ != 0) await_parcels(work, deadline);
    if (const auto transfer = work.transfer()) mailbox_.wait(*transfer, work.occasion(deadline));
  } catch (...) {
    error = std::current_exception();
  }
  {
    const std::lock_guard lock(mutex_);
    --waiting_;
  }
  work.settle();
  forget(work);
  if (error && !work.is_moved()) std::rethrow_exception(error);
}

bool Messages::wait_until(MessageWork& work, shm::Deadline deadline) {
  forks_.require_none(work.ask_.name);
  const auto over = [&] { return work.is_moved() || shm::Clock::now() >= deadline; };
  while (!over()) {
    progress();
    if (glances())
      glance(work, over, shm::Clock::now() + kForEver);
    else
      mailbox_.work([&] { return over() || stirs(); }, work.occasion(shm::Clock::now() + kForEver));
  }
  work.settle();
  return work.is_moved();
}

void Messages::forget(const MessageWork& work) {
  const std::lock_guard lock(mutex_);
  std::erase_if(open_, [&](const auto& w) { return w.get() == &work; });
}

// What others have moved. Callbacks run without the lock.
bool Messages::settle_done(Lock& lock) {
  const auto first = std::stable_partition(open_.begin(), open_.end(),
                                           [](const auto& w) { return !w->is_moved(); });
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
    return closed_ || waiting_ > 0 || glances() || stirs() ||
           std::any_of(open_.begin(), open_.end(), [](const auto& w) { return w->is_moved(); });
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
    tick(lock);
    ++ticks;
    if (!open_.empty()) ticks = 0;
    while (settle_done(lock)) continue;
    if (!closed_ && !open_.empty() && waiting_ == 0 && !glances() && !stirs()) move_on(lock);
  }
}

// Whoever waits for one message does not look after what leaves for another.
void Messages::tick(Lock& lock) {
  if (!glances() && !stirs()) {
    changed_.wait_for(lock, kTick, [&] { return closed_; });
    return;
  }
  lock.unlock();
  fail_with_group();
  progress();
  std::this_thread::sleep_for(kGlance);
  lock.lock();
}

void Messages::finish(shm::Deadline deadline) {
  const auto over = [&] { return shm::Clock::now() >= deadline; };
  const shm::Occasion occasion{"destroy_process_group", 0, shm::Clock::now() + kForEver};
  for (bool idle = false; !idle && !over();) {
    group_->require_whole(occasion);
    progress();
    if (glances())
      std::this_thread::sleep_for(kGlance);
    else
      idle = mailbox_.work([&] { return over() || stirs(); }, occasion);
  }
  drop_leaving();
  if (!mailbox_.idle()) group_->abort("it was destroyed while messages were under way");
  mailbox_.progress();
}

bool Messages::close(std::chrono::milliseconds grace) {
  const auto deadline = shm::Clock::now() + grace;
  try {
    finish(deadline);
  } catch (const std::exception&) {
    fail_with_group();
  }
  drop_leaving();
  std::thread thread;
  {
    Lock lock(mutex_);
    closed_ = true;
    changed_.notify_all();
    thread.swap(thread_);
  }
  mailbox_.wake();
  if (thread.joinable()) thread.join();
  {
    Lock lock(mutex_);
    settle_done(lock);
  }
  {
    const std::lock_guard lock(handed_mutex_);
    handed_over_.clear();
  }
  return parcels_->close(deadline);
}

}  // namespace pycollect::dist
