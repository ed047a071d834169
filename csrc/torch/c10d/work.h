// Work objects of collectives that have run or are in a group's queue.
#pragma once
#include <ATen/core/ivalue.h>

#include <atomic>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "call.h"

namespace pycollect::dist {

class CallQueue;
using Future = c10::ivalue::Future;

// Returns a future of a list of tensors, on the devices of `staging` if that is not null and of the
// sparse ones of `results`.
c10::intrusive_ptr<Future> new_future(const TensorStaging* staging = nullptr,
                                      const Tensors& results = {});
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

enum class WorkState {
  waits,  // for the ranks on which it depends to post their side, or for a device
  runs,   // a thread uses its tensors
  done    // has run, or has failed
};

// A work that a queue or a mailbox runs after the call that returned it. The queue's or mailbox's
// mutex guards the changes of its state.
class PostedWork : public GroupWork {
 public:
  bool isCompleted() override;  // true: the results are on the devices, too
  bool isSuccess() const override { return is_done() && exception() == nullptr; }
  std::exception_ptr exception() const override;
  void synchronize() override { wait(); }
  c10::intrusive_ptr<Future> getFuture() override;
  c10::intrusive_ptr<Future> getFutureResult() override { return getFuture(); }

  virtual const char* name() const = 0;
  virtual std::chrono::milliseconds limit() const = 0;  // of a wait without a timeout
  bool is_done() const { return state_.load(std::memory_order_acquire) == WorkState::done; }
  bool runs() const { return state_.load(std::memory_order_acquire) == WorkState::runs; }
  // Call the functions below with the mutex locked.
  void start() { state_ = WorkState::runs; }
  void suspend() { state_ = WorkState::waits; }  // a part of it has run
  // Returns the future to complete without the mutex, or null.
  c10::intrusive_ptr<Future> finish(std::exception_ptr error);
  bool has_future() const { return future_ != nullptr; }
  ipc::Deadline due() const { return due_; }  // Deadline::max() without a future

 protected:
  explicit PostedWork(WorkState state = WorkState::waits) : state_(state) {}

 private:
  // Lets the ranks on which the work depends continue, if they need this thread's permission.
  virtual void give_way() = 0;
  virtual std::mutex& mutex() = 0;
  virtual void count_open_futures(int more) = 0;  // called with the mutex locked

  std::atomic<WorkState> state_;
  std::exception_ptr error_;  // written once, before the work is done
  c10::intrusive_ptr<Future> future_;
  ipc::Deadline due_ = ipc::Deadline::max();
};

class CollectiveWork final : public PostedWork {
 public:
  CollectiveWork(Call call, std::shared_ptr<CallQueue> queue)  // null queue: the call has run
      : PostedWork(queue ? WorkState::waits : WorkState::done),
        call_(std::move(call)),
        queue_(std::move(queue)) {}

  int sourceRank() const override { return -1; }
  uint64_t getSequencenumber() const override { return call_.number; }
  Tensors result() override { return call_.results; }
  TensorStaging* staging() const override { return call_.staging.get(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;

  // For the queue.
  Call& call() { return call_; }
  const char* name() const override { return call_.name; }
  std::chrono::milliseconds limit() const override { return call_.timeout; }
  void release();  // releases the members of the call that only the run needs
  Call detach();   // returns them instead, so that the caller can release them later

 private:
  std::string describe() const;
  void give_way() override;
  std::mutex& mutex() override;
  void count_open_futures(int more) override;

  Call call_;
  const std::shared_ptr<CallQueue> queue_;
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
