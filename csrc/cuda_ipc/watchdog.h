// Watchdog: polls device work until complete, because no host thread waits for it. On a peer death
// or timeout it aborts the group as a host's wait would, and releases every blocked stream. It sees
// all that it needs for this in shared memory: while a stream waits for a dead peer, every call of
// CUDA may block. A second thread asks CUDA whether the device has failed.
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

// Pending work: the device work of one call. It is pending before its first wait is enqueued,
// because enqueueing blocks the host if the stream's queue is full of work behind a wait.
class PendingWork {
 public:
  struct WorkInfo {
    std::string operation;
    uint64_t call;
    ipc::Deadline deadline;
    // Whether the work has ended; throws if it ended without results. Does not call CUDA.
    std::function<bool()> reached;
  };
  // `awaited`: [rank]: signal of that rank that earlier work waits for.
  PendingWork(WorkInfo info, std::vector<uint64_t> awaited)
      : info_(std::move(info)), awaited_(std::move(awaited)) {}

  // For the thread that enqueues the work: before it enqueues each wait, and after all work.
  // `exposed`: this rank's memory that peers access in place during the work.
  void add_wait(Rank r, uint64_t value);
  void set_end(std::function<bool()> query, std::shared_ptr<void> exposed);
  // The device has failed, and the work's end will not be reached.
  void lose(std::exception_ptr error, bool reported);

  // Returns true if the work has ended, successfully or not. From any thread.
  bool ended();
  std::exception_ptr error() const;  // null: none yet
  // Returns error() for the caller of the collective, and marks it as reported.
  std::exception_ptr report();

 private:
  friend class Watchdog;
  ipc::OpContext context() const { return {info_.operation.c_str(), info_.call, info_.deadline}; }
  void fail(std::exception_ptr error);
  bool is_reported() const;
  bool is_through() const;  // whether the stream does no more for this work
  void check_device();      // calls CUDA; loses the work if the device has failed
  std::vector<uint64_t> awaited() const;
  std::shared_ptr<void> take_exposed();  // only when the work has ended

  const WorkInfo info_;
  mutable std::mutex mutex_;       // guards the members below
  std::vector<uint64_t> awaited_;  // [rank]: signal of that rank that the work waits for
  std::function<bool()> query_;    // null: the work is not yet enqueued
  std::shared_ptr<void> exposed_;
  std::exception_ptr error_;
  bool reported_ = false, lost_ = false;
};

// Deliberately leaks exposed memory: a peer's running launch may still write into it, whatever has
// failed meanwhile, so no allocator may reuse the memory while this process runs.
void leak(std::shared_ptr<void> exposed);

class Watchdog {
 public:
  // Starts the watchdog's threads. If that fails, the GPU rendezvous reports it to all ranks.
  Watchdog(std::shared_ptr<ipc::Group> group, const SignalPad& signal_pad);
  ~Watchdog();  // after `close`, or if no work was added
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  void add(std::shared_ptr<PendingWork> work);
  // Releases what calls that have ended used. From any thread but the watchdog's: freeing memory,
  // or an event, may wait for all streams, and only the watchdog releases blocked ones.
  void free_returned();
  // Waits until all pending work has ended, and accepts no more. Aborts the group at the deadline;
  // the work ends then, unless the stream waits for something else than the group's ranks. Returns
  // the first error that no caller has received.
  std::exception_ptr close(ipc::Deadline deadline);
  // After close(): whether work is pending. Then the watchdog must not be destroyed.
  bool is_stuck() const;

 private:
  using Lock = std::unique_lock<std::mutex>;
  void serve();
  void serve_checks();
  void end();
  void poll_until_done(const std::shared_ptr<PendingWork>& work);
  void release(const std::shared_ptr<PendingWork>& work);
  void request_check(const std::shared_ptr<PendingWork>& work, ipc::Deadline& next);
  std::vector<uint64_t> last_awaited();
  std::vector<Rank> missing(const PendingWork& work) const;

  const std::shared_ptr<ipc::Group> group_;
  const SignalPad signal_pad_;
  mutable std::mutex mutex_;
  std::condition_variable changed_, check_requested_;
  std::deque<std::shared_ptr<PendingWork>> open_;
  std::shared_ptr<PendingWork> to_check_;  // null: no check is requested
  bool closed_ = false;
  std::vector<std::shared_ptr<PendingWork>> failed_;
  std::vector<std::shared_ptr<void>> returned_;
  std::thread thread_, checker_;
};

}  // namespace pycollect::cuda_ipc
