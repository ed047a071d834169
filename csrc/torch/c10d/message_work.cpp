// See messages.h: one send or receive, as torch knows it.
#include <ATen/EmptyTensor.h>

#include "../../plan/error.h"
#include "../threads.h"
#include "messages.h"

namespace pycollect::dist {

MessageWork::MessageWork(const Ask& ask, at::Tensor tensor, std::shared_ptr<Messages> messages)
    : ask_(ask), tensor_(std::move(tensor)), dense_(tensor_), messages_(std::move(messages)) {
  if (tensor_.is_contiguous()) return;
  dense_ = at::Tensor(at::detail::empty_cpu(tensor_.sizes(), tensor_.scalar_type()));
  if (!ask_.receives) lay(dense_, tensor_);
}

std::byte* MessageWork::memory() const {
  return static_cast<std::byte*>(ask_.receives ? dense_.mutable_data_ptr()
                                               : const_cast<void*>(dense_.const_data_ptr()));
}

shm::Envelope MessageWork::envelope(int tag) const {
  return {static_cast<uint64_t>(dense_.nbytes()),
          static_cast<uint8_t>(dtype_of(dense_, {ask_.name, "tensor"})),
          static_cast<uint32_t>(tag)};
}

std::shared_ptr<Messages> MessageWork::messages() const {
  const std::lock_guard lock(mutex_);
  return messages_;
}

void MessageWork::settle() {
  c10::intrusive_ptr<Future> future;
  std::shared_ptr<Messages> last;
  {
    const std::lock_guard lock(mutex_);
    if (settled_ || !transfer_->done()) return;
    try {
      transfer_->rethrow();
      if (ask_.receives && !dense_.is_same(tensor_)) lay(tensor_, dense_);
    } catch (...) {
      error_ = std::current_exception();
    }
    settled_ = true;
    future = future_;
    last.swap(messages_);
  }
  if (future) complete(*future, {tensor_}, error_);
}

std::string MessageWork::described() const {
  const Rank peer = transfer_->peer();
  const char* way = ask_.receives ? " from " : " to ";
  return peer < 0 ? text(ask_.name, way, "any rank") : text(ask_.name, way, "rank ", peer);
}

bool MessageWork::isCompleted() {
  if (const auto messages = this->messages()) messages->progress();
  settle();
  const std::lock_guard lock(mutex_);
  return settled_;
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
  if (const auto messages = this->messages()) {
    if (!is_limit(timeout))
      messages->wait(*this, shm::Clock::now() + ask_.timeout);
    else if (!messages->wait_until(*this, shm::Clock::now() + timeout))
      throw_unfinished(described(), timeout);
  }
  if (auto error = exception()) std::rethrow_exception(error);
  return true;
}

void MessageWork::abort() {
  if (const auto messages = this->messages())
    messages->abort(std::string(ask_.name) + " was aborted");
}

c10::intrusive_ptr<Future> MessageWork::getFuture() {
  bool complete_now = false;
  {
    const std::lock_guard lock(mutex_);
    if (future_) return future_;
    future_ = new_future();
    complete_now = settled_;
  }
  if (complete_now) complete(*future_, {tensor_}, error_);
  return future_;
}

}  // namespace pycollect::dist
