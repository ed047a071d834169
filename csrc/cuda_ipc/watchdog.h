// Watchdog: polls device work until complete, because no host thread waits for it. On a peer death
// or timeout it aborts the group as a host's wait would, and releases every blocked stream.
#pragma once
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "../group/group.h"
#include "signal_pad.h"

namespace pycollect::cuda_ipc {

// Pending work: the device work of one call.
class PendingWork {
 public:
  struct WorkInfo {
    std::string operation;
    uint64_t call;
    ipc::Deadline deadline;
    std::function<bool()> reached;       // whether the work has ended; throws a device's error
    std::vector<uint64_t> awaited = {};  // [rank]: signal of that rank that the work waits for
  };
  // `exposed`: this rank's memory that peers access in place during the work.
  PendingWork(WorkInfo info, std::shared_ptr<void> exposed)
      : info_(std::move(info)), exposed_(std::move(exposed)) {}

  // Returns true if the work has ended, successfully or not. From any thread.
  bool ended();
  std::exception_ptr error() const;  // null: none yet
  // Returns error() for the caller of the collective, and marks it as reported.
  std::exception_ptr report();

 private:
  friend class Watchdog;
  ipc::OpContext context() const { return {info_.operation.c_str(), info_.call, info_.deadline}; }
  void fail(std::exception_ptr error);
  std::shared_ptr<void> take_exposed();  // only when the work has ended

  const WorkInfo info_;
  std::shared_ptr<void> exposed_;  // accessed only by the watchdog's thread
  mutable std::mutex mutex_;
  std::exception_ptr error_;
  bool reported_ = false;
};

// Deliberately leaks exposed memory: a peer's running launch may still write into it, whatever has
// failed meanwhile, so no allocator may reuse the memory while this process runs.
void leak(std::shared_ptr<void> exposed);

class Watchdog {
 public:
  // Starts the watchdog's thread. If that fails, the GPU rendezvous reports it to all ranks.
  Watchdog(std::shared_ptr<ipc::Group> group, const SignalPad& signal_pad);
  ~Watchdog();  // after `close`, or if no work was added
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  void add(std::shared_ptr<PendingWork> work);
  // Releases memory exposed by calls that have ended. From any thread but the watchdog's: freeing
  // memory may wait for all streams, and only the watchdog releases blocked ones.
  void free_returned();
  // Waits until all pending work has ended. Aborts the group if that takes longer than `timeout`.
  // Accepts no more work. Returns the first error that no caller has received.
  std::exception_ptr close(std::chrono::milliseconds timeout);

 private:
  using Lock = std::unique_lock<std::mutex>;
  void serve();
  void end();
  void poll_until_done(PendingWork& work);
  void release(PendingWork& work) const;
  std::vector<Rank> missing(const PendingWork& work) const;

  const std::shared_ptr<ipc::Group> group_;
  const SignalPad signal_pad_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<PendingWork>> open_;
  bool closed_ = false;
  std::vector<std::shared_ptr<PendingWork>> failed_;
  std::vector<std::shared_ptr<void>> returned_;
  std::thread thread_;
};

}  // namespace pycollect::cuda_ipc
