// See messages.h. The service thread polls once a millisecond, and sleeps after a while without
// messages, because waking it would slow a send or receive that is waited for at once.
#include "messages.h"

#include <pthread.h>

#include <algorithm>

#include "../../plan/error.h"

namespace pycollect::dist {
namespace {

constexpr std::chrono::milliseconds kTick{1};
constexpr int kTicksAwake = 100;
// For a wait that ends by its own condition: Mailbox::wait must not time out.
constexpr auto kNoLimit = std::chrono::hours(24 * 365);

}  // namespace

Messages::Messages(std::shared_ptr<ipc::Group> group, const DeviceOps& devices,
                   std::shared_ptr<ipc::RemotePeers> remote)
    : group_(std::move(group)),
      mailbox_(*group_, std::move(remote)),
      on_devices_(*group_, mailbox_, devices.with_own_streams()) {}

bool Messages::check(const P2POp& op, const char* name, bool receives) const {
  fork_guard_.require_not_forked(name);
  return check_message(op, name, receives, group_->all_ranks(), on_devices_.devices());
}

// A PostingScope exists from before a message is visible to any thread until the message is in
// `open_` or complete. Closing the group waits for all scopes, and so misses no message.
class Messages::PostingScope {
 public:
  PostingScope(Messages& all, const char* name) : all_(all) {
    const std::lock_guard lock(all_.mutex_);
    if (!all_.accepting_) throw CollectiveError(text(name, ": the group has been destroyed"));
    if (!all_.thread_.joinable())
      all_.thread_ = ipc::new_thread([self = all_.shared_from_this()] { self->serve(); });
    ++all_.posting_;
    number = all_.next_number_++;
  }
  ~PostingScope() {
    const std::lock_guard lock(all_.mutex_);
    if (--all_.posting_ == 0 && !all_.accepting_) all_.changed_.notify_all();
  }
  PostingScope(const PostingScope&) = delete;
  PostingScope& operator=(const PostingScope&) = delete;

  uint64_t number;

 private:
  Messages& all_;
};

// Returns the number of a rank of the world as a peer of the mailbox.
std::optional<Rank> Messages::mailbox_peer(std::optional<Rank> rank) const {
  const std::vector<Rank>& ranks = group_->settings().world_ranks;
  if (!rank || ranks.empty()) return rank;
  return static_cast<Rank>(std::ranges::find(ranks, *rank) - ranks.begin());
}

WorkPtr Messages::submit(const P2POp& op, const char* name, bool receives) {
  const bool on_device = check(op, name, receives);
  const PostingScope scope(*this, name);
  const MessageWork::MessageInfo info{name,   scope.number, mailbox_peer(op.peer),
                                      op.tag, op.timeout,   receives};
  auto work = c10::make_intrusive<MessageWork>(
      info, op.tensor, on_device ? on_devices_.staging() : nullptr, shared_from_this());
  work->event_ = begin_event(op, receives);
  if (receives)
    work->post(mailbox_);
  else
    on_devices_.post_in_order(work);
  return track(std::move(work));
}

WorkPtr Messages::send(const P2POp& op) { return submit(op, "send", false); }
WorkPtr Messages::receive(const P2POp& op) { return submit(op, "recv", true); }

WorkPtr Messages::track(c10::intrusive_ptr<MessageWork> work) {
  if (work->is_moved()) {
    work->settle();
    return work;
  }
  const std::lock_guard lock(mutex_);
  open_.push_back(work);
  if (polling_) changed_.notify_all();
  return work;
}

bool Messages::progress() {
  on_devices_.progress();
  return mailbox_.progress();
}

// After a signal the group is aborted: the caller may use the tensors for something else.
void Messages::await(const std::function<bool()>& done, const MissingRanks& missing,
                     ipc::Transfer* transfer, const ipc::OpContext& context) {
  const auto holds = [&] {
    on_devices_.progress();
    return done();
  };
  try {
    mailbox_.wait({holds, missing, transfer, [this] { return on_devices_.polls(); }}, context);
  } catch (const ipc::Interruption&) {
    group_->abort(text("a signal interrupted it in ", context.operation));
    fail_with_group();
    throw;
  }
}

void Messages::wait(MessageWork& work, ipc::Deadline deadline) {
  fork_guard_.require_not_forked(work.info_.name);
  {
    const std::lock_guard lock(mutex_);
    ++waiting_;
  }
  std::exception_ptr error, raised;
  const auto missing = [&] { return this->missing(work, group_->gone()); };
  try {
    const ipc::OpContext context = work.context(deadline);
    if (!work.transfer())
      await([&] { return work.transfer() || work.is_moved(); }, missing, nullptr, context);
    if (const auto transfer = work.transfer(); transfer && !transfer->done())
      await([&] { return transfer->done(); }, missing, transfer.get(), context);
  } catch (const ipc::Interruption&) {
    raised = std::current_exception();
  } catch (...) {
    error = std::current_exception();
  }
  {
    const std::lock_guard lock(mutex_);
    --waiting_;
  }
  work.settle();
  if (work.is_moved()) forget(work);
  if (raised) std::rethrow_exception(raised);
  if (error && !work.is_moved()) std::rethrow_exception(error);
}

bool Messages::wait_until(MessageWork& work, ipc::Deadline deadline) {
  fork_guard_.require_not_forked(work.info_.name);
  const auto done = [&] { return work.is_moved() || ipc::Clock::now() >= deadline; };
  await(
      done, [&] { return missing(work, group_->gone()); }, work.transfer().get(),
      work.context(ipc::Clock::now() + kNoLimit));
  work.settle();
  return work.is_moved();
}

void Messages::forget(const MessageWork& work) {
  const std::lock_guard lock(mutex_);
  std::erase_if(open_, [&](const auto& w) { return w.get() == &work; });
}

// Settles messages that other threads have moved. Callbacks run without the lock.
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

// Called in a polling loop, so it locks each message only once.
bool Messages::any_moved_or_due(ipc::Deadline before) const {
  return std::any_of(open_.begin(), open_.end(),
                     [&](const auto& w) { return w->is_moved_or_due(before); });
}

// Returns the context of the open message whose future has the earliest deadline.
ipc::OpContext Messages::most_urgent() const {
  ipc::OpContext first{"send or recv", 0, ipc::Deadline::max()};
  for (const auto& work : open_)
    if (const auto due = work->due(); due < first.deadline && !work->is_moved())
      first = work->context(due);
  return first;
}

// Returns whether waiting threads can serve all messages. Each moves every message, but checks only
// its own deadline and peer, so they do not suffice if a future's deadline has passed or its peer
// is gone.
bool Messages::waiters_suffice() const {
  if (waiting_ == 0) return false;
  const uint64_t gone = group_->gone();
  const auto now = ipc::Clock::now();
  return std::none_of(open_.begin(), open_.end(), [&](const auto& work) {
    const ipc::Deadline due = work->due();
    if (due == ipc::Deadline::max() || work->is_moved()) return false;
    if (due <= now || (gone == 0 && !mailbox_.any_gone())) return due <= now;
    const std::vector<Rank> missing = this->missing(*work, gone);
    return std::ranges::any_of(missing, [&](Rank r) { return is_gone(r, gone); });
  });
}

// Moves messages until one is done or due, or until waiting threads suffice.
void Messages::await_any(Lock& lock) {
  const ipc::OpContext first = most_urgent();
  const auto stop = [&] {
    const std::lock_guard hold(mutex_);
    return closed_ || any_moved_or_due(first.deadline) || waiters_suffice();
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
  const auto must_progress = [&] { return !closed_ && !open_.empty() && !waiters_suffice(); };
  for (int ticks = 0; !closed_;) {
    if (open_.empty() && ticks >= kTicksAwake) {
      polling_ = true;
      changed_.wait(lock, [&] { return closed_ || !open_.empty(); });
      polling_ = false;
      ticks = 0;
    }
    if (!must_progress() || !on_devices_.polls())
      changed_.wait_for(lock, kTick, [&] { return closed_; });
    ++ticks;
    if (!open_.empty()) ticks = 0;
    while (settle_done(lock)) continue;
    if (must_progress()) await_any(lock);
  }
}

void Messages::stop_accepting(ipc::Deadline deadline) {
  Lock lock(mutex_);
  accepting_ = false;
  changed_.wait_until(lock, deadline, [&] { return posting_ == 0; });
}

// Makes progress at least once: another group may have used up the shutdown timeout.
void Messages::finish(ipc::Deadline deadline) {
  const ipc::OpContext context{"destroy_process_group", 0, ipc::Clock::now() + kNoLimit};
  group_->require_healthy(context);
  progress();
  const auto done = [&] {
    return (mailbox_.idle() && !on_devices_.polls() && mailbox_.has_delivered()) ||
           ipc::Clock::now() >= deadline;
  };
  await(done, [this] { return missing(); }, nullptr, context);
}

// A callback may run this on the service thread itself, which then ends by itself.
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

std::exception_ptr Messages::close(ipc::Deadline deadline) {
  stop_accepting(deadline);
  std::exception_ptr raised;
  try {
    finish(deadline);
  } catch (const ipc::Interruption&) {
    raised = std::current_exception();
  } catch (const std::exception&) {
    // The group is aborted; the pending messages fail with its error below.
  }
  on_devices_.drop_unposted(std::make_exception_ptr(CollectiveError(
      "send: the group was destroyed before the tensor's stream reached the send")));
  if (!mailbox_.idle() || !mailbox_.has_delivered())
    group_->abort("it was destroyed while messages were under way");
  fail_with_group();
  end_thread();
  {
    Lock lock(mutex_);
    while (settle_done(lock)) continue;
  }
  on_devices_.close(deadline);
  return raised;
}

// Fails all messages if the group is aborted, as Mailbox::wait does.
void Messages::fail_with_group() {
  try {
    group_->require_healthy({"send or recv", 0, ipc::Deadline::max()});
  } catch (const CollectiveError&) {
    mailbox_.fail(std::current_exception());
    on_devices_.drop_unposted(std::current_exception());
  }
}

// Returns the ranks that the message depends on: its peer alone if that is gone, even if a device
// of this rank still delays the message.
std::vector<Rank> Messages::missing(const MessageWork& work, uint64_t gone) const {
  const Rank peer = work.transfer() ? work.peer() : group_->rank();
  return peer >= 0 && is_gone(peer, gone) ? std::vector<Rank>{peer} : work.missing(mailbox_);
}

std::vector<Rank> Messages::missing() {
  std::vector<Rank> ranks;
  const uint64_t gone = group_->gone();
  const std::lock_guard lock(mutex_);
  for (const auto& work : open_) {
    if (work->is_moved()) continue;
    for (Rank r : missing(*work, gone))
      if (std::find(ranks.begin(), ranks.end(), r) == ranks.end()) ranks.push_back(r);
  }
  return ranks;
}

}  // namespace pycollect::dist
