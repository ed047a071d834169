// See messages.h. The service thread polls once a millisecond, and sleeps after a while without
// messages, because waking it would slow a send or receive that is waited for at once.
#include "messages.h"

#include <ATen/EmptyTensor.h>
#include <pthread.h>

#include <algorithm>

#include "../../plan/error.h"
#include "../threads.h"
#include "interpreter.h"

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
      devices_(devices.with_own_streams()),
      mailbox_(*group_, std::move(remote)) {}

std::string Messages::describe(GroupWork& of) {
  auto& work = static_cast<MessageWork&>(of);
  learn_source(work);
  return work.describe("");
}

void Messages::learn_source(MessageWork& work) const {
  if (const Rank peer = work.transfer->peer(); peer >= 0) work.source = group_->world_rank(peer);
}

// Begins the copies of a device tensor. Peers of the mailbox are numbered by GroupSettings.
ipc::TransferPtr Messages::new_transfer(MessageWork& work) const {
  const auto& [tensor, rank, tag, timeout, receives] = work.op;
  const std::vector<Rank>& ranks = group_->settings().world_ranks;
  Rank peer = rank.value_or(ipc::kAnySource);
  if (rank && !ranks.empty())
    peer = static_cast<Rank>(std::ranges::find(ranks, *rank) - ranks.begin());
  std::byte* memory = nullptr;
  std::function<bool()> is_ready;
  ipc::MemoryOwner owner;  // not of staging memory, which is released when the transfer ends
  if (TensorStaging* const staging = work.staging()) {
    memory = staging->add_tensor(tensor, !receives, receives).base;
    staging->begin_copy_in();
    if (!receives) is_ready = [staging] { return staging->inputs_ready(); };
  } else {
    if (!tensor.is_contiguous()) {
      work.data = at::Tensor(at::detail::empty_cpu(tensor.sizes(), tensor.scalar_type()));
      if (!receives) copy_strided(work.data, tensor);
    }
    memory = static_cast<std::byte*>(receives ? work.data.mutable_data_ptr()
                                              : const_cast<void*>(work.data.const_data_ptr()));
    if (mailbox_.uses_owner(work.envelope().bytes))
      owner = std::make_shared<const at::Tensor>(work.data);
  }
  const auto transfer =
      std::make_shared<ipc::Transfer>(peer, work.envelope(), memory, receives, std::move(owner));
  transfer->is_ready = std::move(is_ready);
  return transfer;
}

// Holds the lock from before the message is visible to any thread until it is in `open_` or
// complete, so that closing the group misses no message.
WorkPtr Messages::post(const P2POp& op) {
  const bool on_device = check_message(op, group_->all_ranks(), *devices_);
  const auto work = c10::make_intrusive<MessageWork>(
      op, next_number_++, group_->rank(), on_device ? stage_through_host(devices_) : nullptr,
      weak_from_this());
  work->transfer = new_transfer(*work);
  Lock lock(mutex_);
  if (!accepting_) throw group_destroyed(op.name());
  if (!thread_.joinable())
    thread_ = ipc::new_thread([self = shared_from_this()] { self->serve(); });
  mailbox_.post(work->transfer);
  if (work->transfer->done()) {
    complete_work(lock, *work);
  } else {
    open_.push_back(work);
    if (polling_) changed_.notify_all();
  }
  return work;
}

// After a signal the group is aborted: the caller may use the tensors for something else.
void Messages::await(const ipc::Mailbox::WaitCondition& until, const ipc::OpContext& context) {
  try {
    mailbox_.wait(until, context);
  } catch (const ipc::Interruption&) {
    group_->abort(text("a signal interrupted it in ", context.operation));
    fail_with_group();
    throw;
  }
}

ipc::OpContext Messages::context(const MessageWork& work, ipc::Deadline deadline) {
  return {work.name(), work.getSequencenumber(), deadline, deadline - ipc::clamped(work.limit())};
}

void Messages::wait(GroupWork& of) {
  auto& work = static_cast<MessageWork&>(of);
  if (work.is_done()) return;
  fork_guard_.require_not_forked(work.name());
  {
    const Lock lock(mutex_);
    ++waiting_;
  }
  ipc::Transfer& transfer = *work.transfer;
  std::exception_ptr error, raised;
  try {
    await({[&] { return transfer.done(); }, [&] { return mailbox_.missing(transfer); }, &transfer},
          context(work, ipc::deadline_after(work.limit())));
  } catch (const ipc::Interruption&) {
    raised = std::current_exception();
  } catch (...) {
    error = std::current_exception();
  }
  Lock lock(mutex_);
  --waiting_;
  if (transfer.done()) {
    await_completion(lock, work);
    std::erase_if(open_, [&](const auto& w) { return w.get() == &work; });
    error = nullptr;  // the work has its own
  }
  if (raised) std::rethrow_exception(raised);
  if (error) std::rethrow_exception(error);
}

bool Messages::wait_until(GroupWork& of, ipc::Deadline deadline) {
  auto& work = static_cast<MessageWork&>(of);
  if (work.is_done()) return true;
  fork_guard_.require_not_forked(work.name());
  ipc::Transfer& transfer = *work.transfer;
  await({[&] { return transfer.done() || ipc::Clock::now() >= deadline; },
         [&] { return mailbox_.missing(transfer); }, &transfer},
        context(work, ipc::Clock::now() + kNoLimit));
  Lock lock(mutex_);
  if (transfer.done()) await_completion(lock, work);
  return work.is_done();
}

// Does not wait for another thread that completes the work.
void Messages::progress(GroupWork& of) {
  if (fork_guard_.forked()) return;
  const GilRelease gil_release;  // a thread that holds the mutex may query an event of a device
  auto& work = static_cast<MessageWork&>(of);
  mailbox_.progress();
  Lock lock(mutex_);
  if (work.transfer->done()) complete_work(lock, work);
}

void Messages::complete_work(Lock& lock, MessageWork& work) {
  if (work.runs() || work.is_done()) return;
  work.start();
  ++completing_;
  lock.unlock();
  work.event.reset();
  learn_source(work);
  TensorStaging* const staging = work.staging();
  std::exception_ptr error;
  try {
    work.transfer->rethrow();
    if (staging != nullptr)
      staging->begin_copy_out();
    else if (work.op.receives && !work.data.is_same(work.op.tensor))
      copy_strided(work.op.tensor, work.data);
  } catch (...) {
    error = std::current_exception();
  }
  if (staging != nullptr) staging->release();
  lock.lock();
  --completing_;
  const auto future = work.finish(error);
  completed_.notify_all();
  if (!future) return;
  lock.unlock();
  complete(*future, work.result(), error, staging);
  lock.lock();
}

// Completes a message that has moved or failed, or waits for the thread that does.
void Messages::await_completion(Lock& lock, MessageWork& work) {
  complete_work(lock, work);
  completed_.wait(lock, [&] { return work.is_done(); });
}

// Completes messages that other threads have moved. Callbacks run without the lock.
bool Messages::complete_moved(Lock& lock) {
  const auto first = std::stable_partition(open_.begin(), open_.end(),
                                           [](const auto& w) { return !w->transfer->done(); });
  if (first == open_.end()) return false;
  std::vector<MessageWorkPtr> moved(std::make_move_iterator(first),
                                    std::make_move_iterator(open_.end()));
  open_.erase(first, open_.end());
  for (const auto& work : moved) complete_work(lock, *work);
  lock.unlock();
  moved.clear();
  lock.lock();
  return true;
}

// Returns whether waiting threads can serve all messages. Each moves every message, but checks only
// its own deadline and peer, so they do not suffice if a future's deadline has passed or its peer
// is gone.
bool Messages::waiters_suffice() const {
  if (waiting_ == 0) return false;
  const uint64_t gone = group_->gone();
  const bool any_gone = gone != 0 || mailbox_.any_gone();
  const auto now = ipc::Clock::now();
  return std::ranges::none_of(open_, [&](const auto& work) {
    if (work->due() == ipc::Deadline::max() || work->transfer->done()) return false;
    if (work->due() <= now || !any_gone) return work->due() <= now;
    const std::vector<Rank> missing = mailbox_.missing(*work->transfer);
    return std::ranges::any_of(missing, [&](Rank r) {
      return r < group_->world() ? (gone >> r & 1) != 0 : mailbox_.is_gone(r);
    });
  });
}

// Moves messages until one is done or due, or until waiting threads suffice.
void Messages::await_any(Lock& lock) {
  ipc::OpContext first{"send or recv", 0, ipc::Deadline::max()};  // with the earliest deadline
  for (const auto& work : open_)
    if (work->due() < first.deadline && !work->transfer->done())
      first = context(*work, work->due());
  const auto stop = [&] {
    const Lock hold(mutex_);
    const auto moved_or_due = [&](const auto& work) {
      return work->due() < first.deadline || work->transfer->done();
    };
    return closed_ || std::ranges::any_of(open_, moved_or_due) || waiters_suffice();
  };
  lock.unlock();
  try {
    await({stop, [this] { return missing(); }}, first);
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
    if (!must_progress() || !mailbox_.awaits_data())
      changed_.wait_for(lock, kTick, [&] { return closed_; });
    ++ticks;
    if (!open_.empty()) ticks = 0;
    while (complete_moved(lock)) continue;
    if (must_progress()) await_any(lock);
  }
}

// Makes progress at least once: another group may have used up the shutdown timeout.
void Messages::finish(ipc::Deadline deadline) {
  const ipc::OpContext context{"destroy_process_group", 0, ipc::Clock::now() + kNoLimit};
  group_->require_healthy(context);
  mailbox_.progress();
  const auto done = [&] {
    return (mailbox_.idle() && mailbox_.has_delivered()) || ipc::Clock::now() >= deadline;
  };
  await({done, [this] { return missing(); }}, context);
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
  {
    const Lock lock(mutex_);
    accepting_ = false;
  }
  std::exception_ptr raised;
  try {
    finish(deadline);
  } catch (const ipc::Interruption&) {
    raised = std::current_exception();
  } catch (const std::exception&) {
    // The group is aborted; the pending messages fail with its error below.
  }
  mailbox_.fail_unready(std::make_exception_ptr(CollectiveError(
      "send: the group was destroyed before the tensor's stream reached the send")));
  if (!mailbox_.idle() || !mailbox_.has_delivered())
    group_->abort("it was destroyed while messages were under way");
  fail_with_group();
  end_thread();
  {
    Lock lock(mutex_);
    while (complete_moved(lock)) continue;
    completed_.wait(lock, [&] { return completing_ == 0; });  // by threads that wait for a message
  }
  devices_->await_held(device_deadline(deadline));
  return raised;
}

// Fails all messages if the group is aborted, as Mailbox::wait does.
void Messages::fail_with_group() {
  try {
    group_->require_healthy({"send or recv", 0, ipc::Deadline::max()});
  } catch (const CollectiveError&) {
    mailbox_.fail(std::current_exception());
  }
}

std::vector<Rank> Messages::missing() {
  std::vector<Rank> ranks;
  const Lock lock(mutex_);
  for (const auto& work : open_) {
    if (work->transfer->done()) continue;
    for (const Rank r : mailbox_.missing(*work->transfer))
      if (std::ranges::find(ranks, r) == ranks.end()) ranks.push_back(r);
  }
  return ranks;
}

}  // namespace pycollect::dist
