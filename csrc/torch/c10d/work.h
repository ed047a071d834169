// Work objects of collectives that have run or are in a group's queue.
#pragma once
#include <ATen/core/ivalue.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "call.h"

namespace pycollect::dist {

class CallQueue;
using Future = c10::ivalue::Future;

// Returns a future of a list of tensors, on the devices of `staging` if that is not null.
c10::intrusive_ptr<Future> new_future(const TensorStaging* staging = nullptr);
void complete(Future& future, const Tensors& results, std::exception_ptr error,
              TensorStaging* staging = nullptr);

// Returns whether `timeout` limits a `wait`; zero stands for no limit.
inline bool is_limit(std::chrono::milliseconds timeout) { return timeout.count() > 0; }
[[noreturn]] void throw_unfinished(const std::string& operation, std::chrono::milliseconds timeout);

class GroupWork : public c10d::Work {
 public:
  // Staging of device tensors; null: host tensors.
  virtual TensorStaging* staging() const = 0;
};

class CollectiveWork final : public GroupWork {
 public:
  CollectiveWork(Call call, std::shared_ptr<CallQueue> queue)  // null queue: the call has run
      : call_(std::move(call)), queue_(std::move(queue)), done_(queue_ == nullptr) {}

  bool isCompleted() override;  // true: the results are on the devices, too
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override { return -1; }
  uint64_t getSequencenumber() const override { return call_.number; }
  Tensors result() override { return call_.results; }
  TensorStaging* staging() const override { return call_.staging.get(); }
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<Future> getFuture() override;
  c10::intrusive_ptr<Future> getFutureResult() override { return getFuture(); }

  // For the queue.
  Call& call() { return call_; }
  const char* name() const { return call_.name; }
  bool is_done() const { return done_.load(std::memory_order_acquire); }  // true: the call has run
  void release();  // releases the members of the call that only the run needs
  Call detach();   // returns them instead, so that the caller can release them later
  bool has_future() const { return future_ != nullptr; }  // call under the queue's lock
  // Call under the queue's lock, and complete the returned future without it.
  c10::intrusive_ptr<Future> finish(std::exception_ptr error);

 private:
  std::string describe() const;

  Call call_;
  const std::shared_ptr<CallQueue> queue_;
  std::atomic<bool> done_;
  std::exception_ptr error_;
  c10::intrusive_ptr<Future> future_;
};

// Several works as one, returned by Backend::endCoalescing.
class CoalescedWork final : public c10d::Work {
 public:
  explicit CoalescedWork(std::vector<c10::intrusive_ptr<c10d::Work>> parts)
      : parts_(std::move(parts)) {}

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  Tensors result() override;
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<Future> getFuture() override;
  c10::intrusive_ptr<Future> getFutureResult() override { return getFuture(); }

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> parts_;
};

}  // namespace pycollect::dist
