// See messages.h. The thread only looks in every millisecond, and dozes when there has been nothing
// for a while: a send or a receive that is waited for at once must not pay for waking it.
#include "messages.h"

#include <pthread.h>

#include <algorithm>

#include "../../plan/error.h"
#include "../../shm/new_thread.h"
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
      devices_(ladder_->devices()->twin()),
      mailbox_(*group_) {}

bool Messages::check(const Letter& letter, const char* name, bool receives) const {
  forks_.require_none(name);
  if (letter.peer) check_rank(*letter.peer, group_->world(), name, receives ? "src" : "dst");
  require(letter.tag >= 0, name, ": tag is ", letter.tag, "; it must not be negative");
  const Label label{name, "tensor"};
  const bool away =
      check_operand(letter.tensor, receives ? Use::write : Use::read, label, *ladder_->devices());
  dtype_of(letter.tensor, label);
  return away;
}

// From before a message is known to anybody until it is listed or has completed: the group's end
// waits for that, and overlooks none.
class Messages::Asking {
 public:
  Asking(Messages& all, const char* name) : all_(all) {
    const std::lock_guard lock(all_.mutex_);
    if (!all_.takes_more_) throw CollectiveError(text(name, ": the group has been destroyed"));
    if (!all_.thread_.joinable())
      all_.thread_ = shm::new_thread([self = all_.shared_from_this()] { self->serve(); });
    ++all_.asking_;
    number = all_.made_++;
  }
  ~Asking() {
    const std::lock_guard lock(all_.mutex_);
    if (--all_.asking_ == 0 && !all_.takes_more_) all_.changed_.notify_all();
  }
  Asking(const Asking&) = delete;
  Asking& operator=(const Asking&) = delete;

  uint64_t number;

 private:
  Messages& all_;
};

c10::intrusive_ptr<c10d::Work> Messages::ask(const Letter& letter, const char* name,
                                             bool receives) {
  const bool away = check(letter, name, receives);
  const Asking asking(*this, name);
  const MessageWork::Ask what{name,       asking.number,  letter.peer,
                              letter.tag, letter.timeout, receives};
  auto work = c10::make_intrusive<MessageWork>(
      what, letter.tensor, away ? passage_of(letter.tensor) : nullptr, shared_from_this());
  if (receives)
    post(work);
  else
    dispatch(work);
  return started(std::move(work));
}

c10::intrusive_ptr<c10d::Work> Messages::send(const Letter& letter) {
  return ask(letter, "send", false);
}
c10::intrusive_ptr<c10d::Work> Messages::receive(const Letter& letter) {
  return ask(letter, "recv", true);
}

c10::intrusive_ptr<c10d::Work> Messages::started(c10::intrusive_ptr<MessageWork> work) {
  if (work->is_moved()) {
    work->settle();
    return work;
  }
  const std::lock_guard lock(mutex_);
  open_.push_back(work);
  if (dozes_) changed_.notify_all();
  return work;
}

bool Messages::progress() {
  dispatch_arrived();
  advance_staged();
  return mailbox_.progress();
}

void Messages::await(const std::function<bool()>& over, const Suspects& missing,
                     shm::Transfer* transfer, const shm::Occasion& occasion) {
  const auto holds = [&] {
    dispatch_arrived();
    advance_staged();
    return over();
  };
  mailbox_.wait({holds, missing, transfer, [this] { return glances(); }}, occasion);
}

void Messages::wait(MessageWork& work, shm::Deadline deadline) {
  forks_.require_none(work.ask_.name);
  {
    const std::lock_guard lock(mutex_);
    ++waiting_;
  }
  std::exception_ptr error;
  const auto missing = [&] { return this->missing(work, group_->gone()); };
  try {
    const shm::Occasion occasion = work.occasion(deadline);
    if (!work.transfer())
      await([&] { return work.transfer() || work.is_moved(); }, missing, nullptr, occasion);
    if (const auto transfer = work.transfer(); transfer && !transfer->done())
      await([&] { return transfer->done(); }, missing, transfer.get(), occasion);
  } catch (...) {
    error = std::current_exception();
  }
  {
    const std::lock_guard lock(mutex_);
    --waiting_;
  }
  work.settle();
  if (work.is_moved())
    forget(work);
  else if (error)
    std::rethrow_exception(error);
}

bool Messages::wait_until(MessageWork& work, shm::Deadline deadline) {
  forks_.require_none(work.ask_.name);
  const auto over = [&] { return work.is_moved() || shm::Clock::now() >= deadline; };
  await(
      over, [&] { return missing(work, group_->gone()); }, work.transfer().get(),
      work.occasion(shm::Clock::now() + kForEver));
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

// Looked at all the time, so at each of them once only.
bool Messages::any_calls(shm::Deadline before) const {
  return std::any_of(open_.begin(), open_.end(), [&](const auto& w) { return w->calls(before); });
}

// Which of them must be done first, because it has a future.
shm::Occasion Messages::most_urgent() const {
  shm::Occasion first{"send or recv", 0, shm::Deadline::max()};
  for (const auto& work : open_)
    if (const auto due = work->due(); due < first.deadline && !work->is_moved())
      first = work->occasion(due);
  return first;
}

// Can all be left to threads that wait for a message? Each moves the other messages too, but looks
// for its own deadline and peer alone: so not when a future is late, or its peer gone.
bool Messages::waiters_suffice() const {
  if (waiting_ == 0) return false;
  const uint64_t gone = group_->gone();
  const auto now = shm::Clock::now();
  return std::none_of(open_.begin(), open_.end(), [&](const auto& work) {
    const shm::Deadline due = work->due();
    if (due == shm::Deadline::max() || work->is_moved()) return false;
    if (due <= now || gone == 0) return due <= now;
    const std::vector<Rank> missing = this->missing(*work, gone);
    return std::any_of(missing.begin(), missing.end(),
                       [&](Rank r) { return (gone >> r & 1) != 0; });
  });
}

// Until something is done, or somebody else does it.
void Messages::move_on(Lock& lock) {
  const shm::Occasion first = most_urgent();
  const auto stop = [&] {
    const std::lock_guard hold(mutex_);
    return closed_ || any_calls(first.deadline) || waiters_suffice();
  };
  lock.unlock();
  try {
    await(stop, [this] { return missing(); }, nullptr, first);
  } catch (const std::exception&) {
    fail_with_group();
  }
  lock.lock();
}

void Messages::serve() {
  pthread_setname_np(pthread_self(), "pycollect p2p");
  Lock lock(mutex_);
  const auto serves = [&] { return !closed_ && !open_.empty() && !waiters_suffice(); };
  for (int ticks = 0; !closed_;) {
    if (open_.empty() && ticks >= kTicksAwake) {
      dozes_ = true;
      changed_.wait(lock, [&] { return closed_ || !open_.empty(); });
      dozes_ = false;
      ticks = 0;
    }
    if (!serves() || !glances()) changed_.wait_for(lock, kTick, [&] { return closed_; });
    ++ticks;
    if (!open_.empty()) ticks = 0;
    while (settle_done(lock)) continue;
    if (serves()) move_on(lock);
  }
}

void Messages::take_no_more(shm::Deadline deadline) {
  Lock lock(mutex_);
  takes_more_ = false;
  changed_.wait_until(lock, deadline, [&] { return asking_ == 0; });
}

// Once at least: another group may have taken all the time there was.
void Messages::finish(shm::Deadline deadline) {
  const shm::Occasion occasion{"destroy_process_group", 0, shm::Clock::now() + kForEver};
  group_->require_whole(occasion);
  progress();
  const auto over = [&] {
    return (mailbox_.idle() && !glances()) || shm::Clock::now() >= deadline;
  };
  await(over, [this] { return missing(); }, nullptr, occasion);
}

// From a callback it is this very thread, which ends by itself.
void Messages::end_thread() {
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
    thread.swap(thread_);
  }
  mailbox_.wake();
  if (thread.get_id() == std::this_thread::get_id())
    thread.detach();
  else if (thread.joinable())
    thread.join();
}

void Messages::close(shm::Deadline deadline) {
  take_no_more(deadline);
  try {
    finish(deadline);
  } catch (const std::exception&) {
    // The group is broken, which is what everything fails with below.
  }
  drop_leaving(std::make_exception_ptr(
      CollectiveError("send: the group was destroyed before the stream came to it")));
  if (!mailbox_.idle()) group_->abort("it was destroyed while messages were under way");
  fail_with_group();
  end_thread();
  {
    Lock lock(mutex_);
    while (settle_done(lock)) continue;
  }
  std::vector<c10::intrusive_ptr<MessageWork>> staged;  // let go of without the lock
  const std::lock_guard lock(staged_mutex_);
  staged.swap(staged_);
  any_staged_ = coming_ = false;
}

}  // namespace pycollect::dist
