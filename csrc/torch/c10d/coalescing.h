// Lists of the calls made since startCoalescing(), one per thread, because threads start and end
// coalescing independently. No data of a listed call has moved. Adding a call never throws: the
// list keeps its first refusal until it ends. Uses neither the queue nor the mailbox. And the work
// that the end of coalescing returns.
#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "work.h"

namespace pycollect::dist {

// The reason why a call does not run.
struct Refusal {
  std::string published;     // published to the peers; empty: they fail by themselves
  std::exception_ptr error;  // raised on this rank
};

struct CoalescedList {
  struct CoalescedMessage {
    P2POp op;
    std::shared_ptr<DeviceEvent> requested_at;  // on the caller's stream; null: a host tensor
  };
  std::vector<CollectiveWorkPtr> calls = {};
  std::vector<CoalescedMessage> messages = {};
  AddressRanges written = {};            // memory that `calls` write
  std::optional<Collective> first = {};  // the first collective; none: no collective yet
  std::optional<Refusal> refusal = {};   // the first refusal; if set, no part of the list runs
};

class Coalescing {
 public:
  // Returns the calling thread's list, which no other thread accesses, or null.
  CoalescedList* find();
  void start();
  // Removes and returns the calling thread's list, if there is one.
  std::optional<CoalescedList> take();
  // Call when the group is aborted: later calls are not listed, but fail at once.
  void close() { closed_ = true; }

 private:
  std::mutex mutex_;
  std::atomic<int> threads_{0};  // threads that have a list; if 0, calls need not take the lock
  std::atomic<bool> closed_{false};
  std::map<uint64_t, CoalescedList> lists_;
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
