// See work.h. A work that has run in its caller's thread has no queue and no lock.
#include "work.h"

#include "../../plan/error.h"
#include "queue.h"

namespace pycollect::dist {

c10::intrusive_ptr<Future> new_future() {
  return c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()));
}

void complete(Future& future, const Tensors& results, std::exception_ptr error) {
  if (error)
    future.setErrorIfNeeded(std::move(error));
  else
    future.markCompleted(c10::IValue(results));
}

void throw_unfinished(const std::string& operation, std::chrono::milliseconds timeout) {
  throw Timeout(text(operation, " has not finished within ",
                     std::chrono::duration<double>(timeout).count(), " seconds"));
}

std::string QueuedWork::described() const {
  std::string said = text(name(), " #", call_.number);
  const char* before = ", which rank ";
  const std::vector<Rank> missing = queue_->missing();
  for (Rank r : missing) said += text(std::exchange(before, " and "), r);
  return missing.empty() ? said : said + (missing.size() == 1 ? " has" : " have") + " not begun,";
}

bool QueuedWork::isSuccess() const {
  return done_.load(std::memory_order_acquire) && exception() == nullptr;
}

// Written once, before `done_`.
std::exception_ptr QueuedWork::exception() const {
  return done_.load(std::memory_order_acquire) ? error_ : nullptr;
}

bool QueuedWork::wait(std::chrono::milliseconds timeout) {
  if (!isCompleted()) {
    if (!is_limit(timeout))
      queue_->wait(*this);
    else if (!queue_->wait_until(*this, shm::Clock::now() + timeout))
      throw_unfinished(described(), timeout);
  }
  if (error_) std::rethrow_exception(error_);
  return true;
}

void QueuedWork::abort() {
  if (!isCompleted()) queue_->abort(text(name(), " was aborted"));
}

c10::intrusive_ptr<Future> QueuedWork::getFuture() {
  if (queue_ == nullptr) {
    auto future = new_future();
    complete(*future, call_.results, nullptr);
    return future;
  }
  bool first = false;
  {
    const std::lock_guard lock(queue_->mutex());
    first = future_ == nullptr;
    if (first) future_ = new_future();
    first = first && isCompleted();
  }
  if (first) complete(*future_, call_.results, error_);
  return future_;
}

void QueuedWork::let_go() {
  call_.requests.clear();
  call_.held.clear();
  call_.copies.clear();
}

c10::intrusive_ptr<Future> QueuedWork::finish(std::exception_ptr error) {
  error_ = std::move(error);
  done_.store(true, std::memory_order_release);
  return future_;
}

bool JointWork::isCompleted() {
  for (const auto& part : parts_)
    if (!part->isCompleted()) return false;
  return true;
}

bool JointWork::isSuccess() const {
  for (const auto& part : parts_)
    if (!part->isSuccess()) return false;
  return true;
}

std::exception_ptr JointWork::exception() const {
  for (const auto& part : parts_)
    if (auto error = part->exception()) return error;
  return nullptr;
}

Tensors JointWork::result() {
  Tensors all;
  for (const auto& part : parts_)
    for (at::Tensor& t : part->result()) all.push_back(std::move(t));
  return all;
}

// All of them, also when one has failed: their memory is the caller's again afterwards.
bool JointWork::wait(std::chrono::milliseconds timeout) {
  const auto deadline = shm::Clock::now() + timeout;
  std::exception_ptr error;
  for (const auto& part : parts_) {
    auto left = timeout;
    if (is_limit(timeout))
      left = std::max(
          std::chrono::milliseconds(1),
          std::chrono::duration_cast<std::chrono::milliseconds>(deadline - shm::Clock::now()));
    try {
      part->wait(left);
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
  return true;
}

void JointWork::abort() {
  for (const auto& part : parts_) part->abort();
}

c10::intrusive_ptr<Future> JointWork::getFuture() {
  c10::List<c10::intrusive_ptr<Future>> futures(
      c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
  for (const auto& part : parts_) futures.push_back(part->getFuture());
  const auto self = c10::intrusive_ptr<JointWork>::unsafe_reclaim_from_nonowning(this);
  return c10::collectAll(futures)->then(
      [self](Future&) {
        if (auto error = self->exception()) std::rethrow_exception(error);
        return c10::IValue(self->result());
      },
      c10::ListType::create(c10::TensorType::get()));
}

}  // namespace pycollect::dist
