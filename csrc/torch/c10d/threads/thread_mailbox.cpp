// See thread_mailbox.h.
#include "thread_mailbox.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <thread>

#include "../../../plan/error.h"
#include "../../../send_recv/mail_area.h"
#include "../../threads.h"
#include "../interpreter.h"
#include "../staging.h"

namespace pycollect::dist {
namespace {

constexpr std::chrono::microseconds kArrivalPollInterval{50};  // of a copy from a device

StreamOrdering* staging_of(const MessageWork& work) {
  return static_cast<StreamOrdering*>(work.staging());
}

bool matches(const MessageWork& receive, const MessageWork& send) {
  return receive.op.tag == send.op.tag && *send.op.peer == receive.rank &&
         (!receive.op.peer || *receive.op.peer == send.rank);
}

// Copies the data of a send, so that the sender may reuse its tensor. A device tensor is copied on
// the sender's stream, which then has no more to do with the message.
void detach(MessageWork& send) {
  const at::Tensor& tensor = send.op.tensor;
  if (tensor.numel() == 0) return;
  if (StreamOrdering* const staging = staging_of(send)) {
    TorchRuntime& torch = staging->devices().torch();
    send.data = torch.empty(tensor.sizes(), tensor.scalar_type(), tensor.device());
    torch.copy(send.data, tensor);
    staging->add_whole(send.data);
    staging->begin_copy_in();
    return staging->end_with_inputs();
  }
  send.data = at::Tensor{at::detail::empty_cpu(tensor.sizes(), tensor.scalar_type())};
  copy_strided(send.data, tensor);
}

}  // namespace

std::string ThreadMailbox::describe(const MessageWork& work) const {
  return work.describe(text(" of group '", group_.name(), "'"));
}

std::vector<Rank> ThreadMailbox::needed(const MessageWork& work) {
  if (work.source >= 0 || !work.op.peer) return {};  // on its way, or any rank can send
  return {*work.op.peer};
}

void ThreadMailbox::fail_all(const ErrorOfOperation& error) {
  std::vector<std::pair<MessageWorkPtr, std::string>> all;
  {
    const std::lock_guard lock(group_.mutex());
    for (auto* const list : {&sends_, &receives_, &arriving_}) {
      for (const MessageWorkPtr& work : *list) all.emplace_back(work, describe(*work));
      list->clear();
    }
  }
  for (const auto& [work, operation] : all)
    if (!work->is_done()) finish(work, error(operation));
}

std::optional<OverdueWork> ThreadMailbox::find_due(ipc::Deadline now) const {
  for (const auto* const list : {&sends_, &receives_, &arriving_})
    for (const MessageWorkPtr& work : *list)
      if (!work->is_done() && work->due() <= now)
        return OverdueWork{describe(*work), needed(*work), work->limit()};
  return {};
}

MessageWorkPtr ThreadMailbox::take_match(const MessageWork& work) {
  auto& others = work.op.receives ? sends_ : receives_;
  const auto found = std::find_if(others.begin(), others.end(), [&](const auto& other) {
    return work.op.receives ? matches(work, *other) : matches(*other, work);
  });
  if (found == others.end()) return {};
  MessageWorkPtr other = std::move(*found);
  others.erase(found);
  return other;
}

void ThreadMailbox::post(const MessageWorkPtr& work) {
  std::unique_lock lock(group_.mutex());
  if (const auto error = group_.aborted()) {
    lock.unlock();
    return finish(work, error);
  }
  const bool receives = work->op.receives;
  if (const MessageWorkPtr other = take_match(*work)) {
    work->start();
    if (!other->is_done()) other->start();
    lock.unlock();
    return receives ? deliver(other, work) : deliver(work, other);
  }
  const bool is_eager = !receives && work->op.tensor.nbytes() <= ipc::MailArea::max_eager_bytes(1);
  if (is_eager) detach(*work);  // may throw
  (receives ? receives_ : sends_).push_back(work);
  if (!is_eager) return;
  work->finish(nullptr);
  lock.unlock();
  work->event.reset();
}

// Copies the message, on the current streams of this thread if it is on a device. Between a device
// and host memory it goes through pinned memory, which torch keeps until the copy has ended.
at::Tensor ThreadMailbox::copy(MessageWork& send, MessageWork& receive) {
  const at::Tensor into = copyable(receive.data);
  StreamOrdering* const sender = staging_of(send);
  StreamOrdering* const receiver = staging_of(receive);
  if (into.numel() == 0) return {};
  for (StreamOrdering* const side : {sender, receiver})
    if (side != nullptr) side->wait_for_inputs();
  const at::Tensor from = copyable(send.data).reshape(into.sizes());  // may enqueue a copy
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

// The receive is done once the data has arrived, which a thread of its own waits for. An abort may
// fail it before.
void ThreadMailbox::await_arrival(const MessageWorkPtr& receive, const at::Tensor& pinned,
                                  const std::shared_ptr<DeviceEvent>& arrival) {
  {
    std::unique_lock lock(group_.mutex());
    if (const auto error = group_.aborted()) {
      lock.unlock();
      return finish(receive, error);
    }
    receive->suspend();
    arriving_.push_back(receive);
    group_.notify();
  }
  try {
    group_.run_on_thread(receive->rank, [this, receive, pinned, arrival] {
      std::exception_ptr error;
      try {
        while (!arrival->reached()) std::this_thread::sleep_for(kArrivalPollInterval);
      } catch (...) {
        error = std::current_exception();
      }
      end_arrival(receive, pinned, error);
    });
  } catch (...) {
    end_arrival(receive, pinned, std::current_exception());
  }
}

// Does nothing if the receive has failed meanwhile, or an abort is about to fail it.
void ThreadMailbox::end_arrival(const MessageWorkPtr& receive, const at::Tensor& pinned,
                                std::exception_ptr error) {
  {
    const std::lock_guard lock(group_.mutex());
    if (group_.aborted() || std::erase(arriving_, receive) == 0) return;
    receive->start();
  }
  try {
    if (!error) copy_strided(receive->data, pinned);
  } catch (...) {
    error = std::current_exception();
  }
  finish(receive, error);
}

void ThreadMailbox::deliver(const MessageWorkPtr& send, const MessageWorkPtr& receive) {
  at::Tensor pinned;
  std::shared_ptr<DeviceEvent> arrival;
  receive->source = send->rank;
  std::exception_ptr error =
      ipc::mismatch(send->rank, send->envelope(), receive->rank, receive->envelope());
  try {
    if (!error) pinned = copy(*send, *receive);
    if (pinned.defined()) arrival = staging_of(*send)->devices().record_event(send->data.device());
  } catch (...) {
    error = std::current_exception();
  }
  if (arrival)
    await_arrival(receive, pinned, arrival);
  else
    finish(receive, error);
  if (!send->is_done()) finish(send, error);
}

void ThreadMailbox::finish(const MessageWorkPtr& work, const std::exception_ptr& error) {
  c10::intrusive_ptr<Future> future;
  work->event.reset();
  {
    const std::lock_guard lock(group_.mutex());
    future = work->finish(error);
    if (future) group_.count_open_futures(-1);
    group_.notify();
  }
  if (future) group_.complete_later(work->rank, future, work);
}

}  // namespace pycollect::dist
