// See message_work.h.
#include "message_work.h"

#include <ATen/EmptyTensor.h>

#include "../../plan/error.h"
#include "../threads.h"
#include "in_flight_guard.h"
#include "messages.h"

namespace pycollect::dist {

MessageWork::MessageWork(const MessageInfo& info, at::Tensor tensor,
                         std::shared_ptr<TensorStaging> staging, std::shared_ptr<Messages> messages)
    : info_(info),
      tensor_(std::move(tensor)),
      staging_(std::move(staging)),
      dense_(tensor_),
      messages_(std::move(messages)),
      world_ranks_(messages_->group().settings().world_ranks) {
  if (staging_) {
    memory_ = staging_->add_tensor(tensor_, !info_.receives, info_.receives).base;
    staging_->begin_copy_in();
    return;
  }
  if (!tensor_.is_contiguous()) {
    dense_ = at::Tensor(at::detail::empty_cpu(tensor_.sizes(), tensor_.scalar_type()));
    if (!info_.receives) copy_strided(dense_, tensor_);
  }
  memory_ = static_cast<std::byte*>(info_.receives ? dense_.mutable_data_ptr()
                                                   : const_cast<void*>(dense_.const_data_ptr()));
}

ipc::Envelope MessageWork::envelope() const {
  return {static_cast<uint64_t>(tensor_.nbytes()), dtype_number(tensor_, {info_.name, "tensor"}),
          static_cast<uint32_t>(info_.tag)};
}

void MessageWork::post(ipc::Mailbox& mailbox) {
  // Staging memory is released when the transfer ends.
  const bool has_owner = !staging_ && mailbox.uses_owner(envelope().bytes);
  const auto owner = has_owner ? std::make_shared<const at::Tensor>(dense_) : nullptr;
  auto posted = info_.receives ? mailbox.receive(info_.peer, envelope(), memory_, owner)
                               : mailbox.send(*info_.peer, envelope(), memory_, owner);
  const std::lock_guard lock(mutex_);
  transfer_ = std::move(posted);
}

std::vector<Rank> MessageWork::missing(const ipc::Mailbox& mailbox) const {
  const std::lock_guard lock(mutex_);
  return transfer_ ? mailbox.missing(*transfer_) : std::vector<Rank>{mailbox.rank()};
}

ipc::Deadline MessageWork::due() const {
  const std::lock_guard lock(mutex_);
  return due_;
}

ipc::TransferPtr MessageWork::transfer() const {
  const std::lock_guard lock(mutex_);
  return transfer_;
}

int MessageWork::sourceRank() const {
  const Rank peer = this->peer();
  return peer < 0 || world_ranks_.empty() ? peer : world_ranks_[peer];
}

Rank MessageWork::peer() const {
  const auto transfer = this->transfer();
  return transfer ? transfer->peer() : info_.peer.value_or(-1);
}

bool MessageWork::is_moved() const {
  const std::lock_guard lock(mutex_);
  return error_ || (transfer_ && transfer_->done());
}

bool MessageWork::is_moved_or_due(ipc::Deadline before) const {
  const std::lock_guard lock(mutex_);
  return due_ < before || error_ || (transfer_ && transfer_->done());
}

void MessageWork::fail(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  error_ = std::move(error);
}

std::shared_ptr<Messages> MessageWork::messages() const {
  const std::lock_guard lock(mutex_);
  return messages_;
}

// The event ends without the mutex.
void MessageWork::end_event() {
  std::shared_ptr<ProfilerEvent> event;
  const std::lock_guard lock(mutex_);
  event.swap(event_);
}

void MessageWork::settle() {
  if (is_moved()) end_event();
  c10::intrusive_ptr<Future> future;
  std::shared_ptr<Messages> released;
  {
    const std::lock_guard lock(mutex_);
    if (settled_ || !(error_ || (transfer_ && transfer_->done()))) return;
    try {
      if (!error_) finish();
    } catch (...) {
      error_ = std::current_exception();
    }
    if (staging_) staging_->release();
    settled_ = true;
    future = future_;
    released.swap(messages_);
  }
  if (future) complete(*future, {tensor_}, error_, staging());
}

void MessageWork::finish() {
  transfer_->rethrow();
  if (staging_) return staging_->begin_copy_out();
  if (info_.receives && !dense_.is_same(tensor_)) copy_strided(tensor_, dense_);
}

std::string MessageWork::describe() const {
  const Rank peer = this->peer();
  const char* direction = info_.receives ? " from " : " to ";
  return peer < 0 ? text(info_.name, direction, "any rank")
                  : text(info_.name, direction, "rank ", sourceRank());
}

bool MessageWork::isCompleted() {
  if (const auto messages = this->messages()) messages->progress();
  settle();
  const std::lock_guard lock(mutex_);
  return settled_ && (error_ || !staging_ || staging_->outputs_ready());
}

bool MessageWork::isSuccess() const {
  const std::lock_guard lock(mutex_);
  return settled_ && !error_;
}

std::exception_ptr MessageWork::exception() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

bool MessageWork::wait(std::chrono::milliseconds timeout) {
  const InFlightGuard in_flight;
  if (staging_) check_no_capture(*staging_, info_.name);
  if (const auto messages = this->messages()) {
    if (!is_limit(timeout))
      messages->wait(*this, ipc::deadline_after(info_.timeout));
    else if (!messages->wait_until(*this, ipc::deadline_after(timeout)))
      throw_unfinished(describe(), timeout);
  }
  if (auto error = exception()) std::rethrow_exception(error);
  if (staging_) staging_->wait_on_current_streams();
  return true;
}

void MessageWork::abort() {
  if (const auto messages = this->messages())
    messages->abort(std::string(info_.name) + " was aborted");
}

c10::intrusive_ptr<Future> MessageWork::getFuture() {
  bool complete_now = false;
  {
    const std::lock_guard lock(mutex_);
    if (future_) return future_;
    future_ = new_future(staging());
    complete_now = settled_;
    due_ = ipc::deadline_after(info_.timeout);
  }
  if (complete_now) complete(*future_, {tensor_}, error_, staging());
  return future_;
}

}  // namespace pycollect::dist
