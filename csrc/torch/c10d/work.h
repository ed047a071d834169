// Work objects of a group's collectives and messages, and what moves them.
#pragma once
#include <ATen/core/ivalue.h>
#include <c10/util/FunctionRef.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <string_view>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "../../group/system.h"
#include "../../plan/error.h"
#include "../../send_recv/transfer.h"
#include "group_call.h"

namespace pycollect::dist {

using Future = c10::ivalue::Future;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Returns a future of a list of tensors, on those of the devices that are not the CPU.
c10::intrusive_ptr<Future> new_future(std::vector<at::Device> devices);
void complete(Future& future, const Tensors& results, std::exception_ptr error,
              TensorStaging* staging = nullptr);

// Returns the error of an operation that comes too late.
inline CollectiveError group_destroyed(std::string_view operation) {
  return CollectiveError(text(operation, ": the group has been destroyed"));
}

// Returns whether `timeout` limits a `wait`; zero stands for no limit.
inline bool is_limit(std::chrono::milliseconds timeout) { return timeout.count() > 0; }

class GroupWork;

// What moves works of one rank: of processes its queue of collectives, or its messages; of threads
// both.
class WorkOwner {
 public:
  virtual ~WorkOwner() = default;
  // Waits until the work is done, which it may be already; at its limit the group is aborted.
  virtual void wait(GroupWork& work) = 0;
  virtual bool wait_until(GroupWork& work, ipc::Deadline deadline) = 0;
  // Called where a caller polls an unfinished work, or takes its future. Moves the work, or lets
  // the ranks on which it depends continue, if they need this thread's permission.
  virtual void progress(GroupWork&) {}
  // Called with the mutex locked when the future of an unfinished work has been taken.
  virtual void on_future_taken() {}
  // Describes a work that has not finished within the timeout of a wait.
  virtual std::string describe(GroupWork& work) = 0;
  virtual void abort(const std::string& why) = 0;
  virtual std::mutex& mutex() = 0;  // guards the state of every work
  const ipc::ForkGuard& fork_guard() const { return fork_guard_; }

 protected:
  const ipc::ForkGuard fork_guard_;
};

enum class WorkState {
  waits,  // for the ranks on which it depends to post their side, or for a device
  runs,   // a thread uses its tensors
  done    // has run, or has failed
};

class GroupWork : public c10d::Work {
 public:
  bool isCompleted() override;  // true: the results are on the devices, too
  bool isSuccess() const override { return is_done() && exception() == nullptr; }
  std::exception_ptr exception() const override { return is_done() ? error_ : nullptr; }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  void abort() override;
  c10::intrusive_ptr<Future> getFuture() override;
  c10::intrusive_ptr<Future> getFutureResult() override { return getFuture(); }

  virtual const char* name() const = 0;
  virtual std::chrono::milliseconds limit() const = 0;  // of a wait without a timeout
  // Staging of device tensors; null: host tensors.
  virtual TensorStaging* staging() const = 0;
  std::vector<at::Device> devices();  // of the results
  bool is_done() const { return state_.load(std::memory_order_acquire) == WorkState::done; }
  bool runs() const { return state_.load(std::memory_order_acquire) == WorkState::runs; }
  // Call the functions below with the owner's mutex locked.
  void start() { state_ = WorkState::runs; }
  void suspend() { state_ = WorkState::waits; }  // a part of it has run
  // Returns the future to complete without the mutex, or null.
  c10::intrusive_ptr<Future> finish(std::exception_ptr error);
  bool has_future() const { return future_ != nullptr; }
  ipc::Deadline due() const { return due_; }  // Deadline::max() without a future

 protected:
 private:
  virtual std::shared_ptr<WorkOwner> owner() const = 0;  // null: the work is done

  std::atomic<WorkState> state_{WorkState::waits};
  std::exception_ptr error_;  // written once, before the work is done
  c10::intrusive_ptr<Future> future_;
  ipc::Deadline due_ = ipc::Deadline::max();
};

class CollectiveWork final : public GroupWork {
 public:
  explicit CollectiveWork(c10::function_ref<GroupCall()> make) : call_(make()) {}

  int sourceRank() const override { return -1; }
  uint64_t getSequencenumber() const override { return call_.number; }
  Tensors result() override { return {call_.results.begin(), call_.results.end()}; }
  const char* name() const override { return call_.name; }
  std::chrono::milliseconds limit() const override { return call_.timeout; }
  TensorStaging* staging() const override { return call_.staging.get(); }

  // For the queue.
  GroupCall& call() { return call_; }
  void enqueue(std::shared_ptr<WorkOwner> queue) { queue_ = std::move(queue); }
  void release();      // releases the members of the call that only the run needs
  GroupCall detach();  // returns them instead, so that the caller can release them later

 private:
  std::shared_ptr<WorkOwner> owner() const override { return queue_; }

  GroupCall call_;
  std::shared_ptr<WorkOwner> queue_;  // null: the call has run on its caller's thread
};
using CollectiveWorkPtr = c10::intrusive_ptr<CollectiveWork>;

// Describes a collective that `missing` have not begun.
std::string describe(const GroupWork& work, const std::vector<Rank>& missing);

struct P2POp {
  at::Tensor tensor;
  std::optional<Rank> peer;  // none: receive from any rank
  int tag;
  std::chrono::milliseconds timeout;
  bool receives;

  const char* name() const { return receives ? "recv" : "send"; }
};

// Throws if the operation is invalid in a group of `world` ranks. Returns whether the tensor is on
// a device.
bool check_message(const P2POp& op, int world, DeviceOps& devices);

class MessageWork final : public GroupWork {
 public:
  // `staging` stages a device tensor; null: a host tensor. The owner lives until the work is
  // done, or a wait throws. A work that is kept, longer perhaps, keeps `kept`.
  MessageWork(const P2POp& op, uint64_t number, Rank rank, std::shared_ptr<TensorStaging> staging,
              std::weak_ptr<WorkOwner> owner, std::shared_ptr<WorkOwner> kept = {});

  int sourceRank() const override;
  uint64_t getSequencenumber() const override { return number_; }
  Tensors result() override { return {op.tensor}; }
  const char* name() const override { return op.name(); }
  std::chrono::milliseconds limit() const override { return op.timeout; }
  TensorStaging* staging() const override { return staging_.get(); }

  // For the owner.
  const P2POp op;
  const Rank rank;                       // of this side
  at::Tensor data;                       // what moves: the tensor, or a copy of it
  std::atomic<Rank> source{-1};          // of a receive that has been matched
  ipc::TransferPtr transfer;             // null: between threads
  std::shared_ptr<ProfilerEvent> event;  // null: no profiler
  ipc::Envelope envelope() const;
  // Returns "recv #3 from rank 1 of group 'default' with tag 0 on [2, 3] float32".
  std::string describe(const std::string& of_group) const;

 private:
  std::shared_ptr<WorkOwner> owner() const override { return owner_.lock(); }

  const uint64_t number_;
  const std::shared_ptr<TensorStaging> staging_;
  const std::weak_ptr<WorkOwner> owner_;
  const std::shared_ptr<WorkOwner> kept_;
};
using MessageWorkPtr = c10::intrusive_ptr<MessageWork>;

}  // namespace pycollect::dist
