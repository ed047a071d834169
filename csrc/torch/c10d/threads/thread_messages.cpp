// See thread_messages.h.
#include "thread_messages.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <array>
#include <thread>

#include "../../../plan/error.h"
#include "../../threads.h"
#include "../gil_release.h"
#include "../in_flight_guard.h"

namespace pycollect::dist {
namespace {

constexpr std::chrono::microseconds kArrivalPollInterval{50};  // of a copy from a device

}  // namespace

ThreadGroup& ThreadMessageWork::group() const { return mailbox_->group(); }

std::mutex& ThreadMessageWork::mutex() { return group().mutex(); }

void ThreadMessageWork::count_open_futures(int more) { group().count_open_futures(more); }

ThreadGroup::GroupWait ThreadMessageWork::until_done(ipc::Deadline deadline, bool is_limited) {
  return {*this, [this] { return needed(); }, [this] { return describe(); }, deadline, is_limited};
}

void ThreadMessageWork::give_way() {
  group().give_way(info.rank, until_done(ipc::Deadline::max(), false));
}

void ThreadMessageWork::abort() {
  group().abort(info.rank, std::string(info.name) + " was aborted");
}

ipc::Envelope ThreadMessageWork::envelope() const {
  return {static_cast<uint64_t>(tensor_.nbytes()), dtype_number(tensor_, {info.name, "tensor"}),
          static_cast<uint32_t>(info.tag)};
}

bool ThreadMessageWork::matches(const ThreadMessageWork& send) const {
  return info.tag == send.info.tag && *send.info.peer == info.rank &&
         (!info.peer || *info.peer == send.info.rank);
}

// A device tensor is copied on the sender's stream, which then has no more to do with the message.
void ThreadMessageWork::detach() {
  if (tensor_.numel() == 0) return;
  if (staging_) {
    TorchRuntime& torch = staging_->devices().torch();
    data_ = torch.empty(tensor_.sizes(), tensor_.scalar_type(), tensor_.device());
    torch.copy(data_, tensor_);
    staging_->add_whole(data_);
    staging_->begin_copy_in();
    return staging_->end_with_inputs();
  }
  data_ = at::Tensor{at::detail::empty_cpu(tensor_.sizes(), tensor_.scalar_type())};
  copy_strided(data_, tensor_);
}

std::string ThreadMessageWork::describe() const {
  return text(info.name, " #", info.number, info.receives ? " from " : " to ",
              info.peer ? text("rank ", *info.peer) : "any rank", " of group '", group().name(),
              "' with tag ", info.tag, " on ", tensor_.sizes(), " ", dtype_name(tensor_));
}

std::vector<Rank> ThreadMessageWork::needed() const {
  if (peer_ >= 0) return {};  // the message is on its way
  if (info.peer) return {*info.peer};
  return {};  // any rank can send, also this one
}

bool ThreadMessageWork::wait(std::chrono::milliseconds timeout) {
  const InFlightGuard in_flight;
  if (staging_) check_no_capture(*staging_, info.name);
  if (!is_limit(timeout))
    group().wait(info.rank, until_done(ipc::deadline_after(info.timeout), false));
  else if (!group().wait_until(info.rank, until_done(ipc::deadline_after(timeout), true)))
    throw_unfinished(describe(), timeout);
  if (const auto error = exception()) std::rethrow_exception(error);
  if (staging_) staging_->wait_on_current_streams();
  return true;
}

std::shared_ptr<ThreadMailbox> ThreadMailbox::of(const std::shared_ptr<ThreadGroup>& group) {
  const std::lock_guard lock(group->mutex());
  if (auto mailbox = group->mailbox.lock()) return mailbox;
  const auto made = std::make_shared<ThreadMailbox>(group);
  group->mailbox = made;
  return made;
}

void ThreadMailbox::fail_all(const ErrorOfOperation& error) {
  std::vector<std::pair<ThreadMessagePtr, std::string>> all;
  {
    const std::lock_guard lock(group_->mutex());
    for (auto* const list : {&sends_, &receives_, &arriving_}) {
      for (const ThreadMessagePtr& work : *list) all.emplace_back(work, work->describe());
      list->clear();
    }
  }
  for (const auto& [work, operation] : all)
    if (!work->is_done()) finish(work, error(operation));
}

std::optional<OverdueWork> ThreadMailbox::find_due(ipc::Deadline now) const {
  for (const auto* const list : {&sends_, &receives_, &arriving_})
    for (const ThreadMessagePtr& work : *list)
      if (!work->is_done() && work->due() <= now)
        return OverdueWork{work->describe(), work->needed(), work->limit()};
  return {};
}

ThreadMessagePtr ThreadMailbox::take_match(const ThreadMessageWork& work) {
  auto& others = work.info.receives ? sends_ : receives_;
  const auto found = std::find_if(others.begin(), others.end(), [&](const auto& other) {
    return work.info.receives ? work.matches(*other) : other->matches(work);
  });
  if (found == others.end()) return {};
  ThreadMessagePtr other = std::move(*found);
  others.erase(found);
  return other;
}

void ThreadMailbox::post(const ThreadMessagePtr& work) {
  std::unique_lock lock(group_->mutex());
  if (const auto error = group_->aborted()) {
    lock.unlock();
    return finish(work, error);
  }
  const bool receives = work->info.receives;
  if (const ThreadMessagePtr other = take_match(*work)) {
    work->start();
    if (!other->is_done()) other->start();
    lock.unlock();
    return receives ? deliver(other, work) : deliver(work, other);
  }
  const bool is_eager = !receives && work->result()[0].nbytes() <= kEagerBytes;
  if (is_eager) work->detach();  // may throw
  (receives ? receives_ : sends_).push_back(work);
  if (!is_eager) return;
  work->finish(nullptr);
  lock.unlock();
  work->event.reset();
}

// Copies the message, on the current streams of this thread if it is on a device. Between a device
// and host memory it goes through pinned memory, which torch keeps until the copy has ended.
at::Tensor ThreadMailbox::copy(ThreadMessageWork& send, ThreadMessageWork& receive) {
  const at::Tensor into = copyable(receive.data());
  DirectStaging* const sender = send.direct_staging();
  DirectStaging* const receiver = receive.direct_staging();
  if (into.numel() == 0) return {};
  for (DirectStaging* const side : {sender, receiver})
    if (side != nullptr) side->wait_for_inputs();
  const at::Tensor from = copyable(send.data()).reshape(into.sizes());  // may enqueue a copy
  if (sender == nullptr && receiver == nullptr) {
    copy_strided(into, from);
    return {};
  }
  at::Tensor pinned;
  if (receiver == nullptr) {
    pinned = sender->devices().new_pinned(from);
    sender->devices().torch().copy(pinned, from);
  } else if (sender == nullptr) {
    const at::Tensor bridge = receiver->devices().new_pinned(into);
    copy_strided(bridge, from);
    receiver->devices().torch().copy(into, bridge);
  } else {
    receiver->devices().torch().copy(into, from);
  }
  if (receiver != nullptr) receiver->begin_copy_out();
  if (sender != nullptr && !send.is_done()) sender->begin_copy_out();
  return pinned;
}

// The receive is done once the data has arrived, which a thread of its own waits for.
void ThreadMailbox::await_arrival(const ThreadMessagePtr& send, const ThreadMessagePtr& receive,
                                  const at::Tensor& pinned) {
  bool is_listed = false;
  try {
    const std::shared_ptr<DeviceEvent> arrival =
        send->direct_staging()->devices().record_event(send->data().device());
    {
      const std::lock_guard lock(group_->mutex());
      if (const auto error = group_->aborted()) std::rethrow_exception(error);
      receive->suspend();
      arriving_.push_back(receive);
      is_listed = true;
      group_->notify();
    }
    group_->run_on_thread(receive->info.rank,
                          [self = shared_from_this(), receive, pinned, arrival] {
                            self->end_arrival(receive, pinned, *arrival);
                          });
  } catch (...) {
    if (!is_listed || take_arriving(receive)) finish(receive, std::current_exception());
  }
}

void ThreadMailbox::end_arrival(const ThreadMessagePtr& receive, const at::Tensor& pinned,
                                const DeviceEvent& arrival) {
  std::exception_ptr error;
  try {
    while (!arrival.reached()) std::this_thread::sleep_for(kArrivalPollInterval);
  } catch (...) {
    error = std::current_exception();
  }
  if (!take_arriving(receive)) return;
  try {
    if (!error) copy_strided(receive->data(), pinned);
  } catch (...) {
    error = std::current_exception();
  }
  finish(receive, error);
}

// Returns false if the receive has failed meanwhile, or an abort is about to fail it.
bool ThreadMailbox::take_arriving(const ThreadMessagePtr& receive) {
  const std::lock_guard lock(group_->mutex());
  if (group_->aborted() || std::erase(arriving_, receive) == 0) return false;
  receive->start();
  return true;
}

void ThreadMailbox::deliver(const ThreadMessagePtr& send, const ThreadMessagePtr& receive) {
  std::exception_ptr error;
  const ipc::Envelope sent = send->envelope(), wanted = receive->envelope();
  at::Tensor pinned;
  receive->set_peer(send->info.rank);
  if (sent.bytes != wanted.bytes || sent.dtype != wanted.dtype) {
    error = ipc::mismatch(send->info.rank, sent, receive->info.rank, wanted);
  } else {
    try {
      pinned = copy(*send, *receive);
    } catch (...) {
      error = std::current_exception();
    }
  }
  if (pinned.defined())
    await_arrival(send, receive, pinned);
  else
    finish(receive, error);
  if (!send->is_done()) finish(send, error);
}

void ThreadMailbox::finish(const ThreadMessagePtr& work, const std::exception_ptr& error) {
  c10::intrusive_ptr<Future> future;
  work->event.reset();
  {
    const std::lock_guard lock(group_->mutex());
    future = work->finish(error);
    if (future) group_->count_open_futures(-1);
    group_->notify();
  }
  if (future) group_->complete_later(work->info.rank, future, work);
}

bool ThreadMessages::check(const P2POp& op, const char* name, bool receives) const {
  return check_message(op, name, receives, mailbox_->group().world(), *devices_);
}

WorkPtr ThreadMessages::submit(const P2POp& op, const char* name, bool receives) {
  const GilRelease gil_release;
  const bool on_device = check(op, name, receives);
  mailbox_->group().require_healthy(rank_, name);
  std::shared_ptr<DirectStaging> staging;
  if (on_device) {
    staging = std::make_shared<DirectStaging>(devices_);
    staging->add_whole(op.tensor);
    staging->begin_copy_in();
  }
  auto work = c10::make_intrusive<ThreadMessageWork>(
      ThreadMessageWork::ThreadMessageInfo{name, next_number_++, rank_, op.peer, op.tag, op.timeout,
                                           receives},
      op.tensor, staging, mailbox_);
  work->event = begin_event(op, receives);
  mailbox_->post(work);
  return work;
}

}  // namespace pycollect::dist
