// Queue of a group whose ranks are processes. A thread that waits for a queued call runs the queue
// up to and including that call; otherwise a thread of the queue does.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <thread>

#include "../../group/fork_guard.h"
#include "call_queue.h"
#include "call_runner.h"

namespace pycollect::dist {

class ProcessQueue final : public CallQueue {
 public:
  explicit ProcessQueue(std::shared_ptr<CallRunner> runner) : runner_(std::move(runner)) {}

  // Runs the call on this thread if the queue is empty; else enqueues it.
  CollectiveWorkPtr run(Call call) override;
  std::vector<CollectiveWorkPtr> push_all(std::vector<Call> calls) override;

  // wait() runs queued calls on this thread until the work is done; wait_until() only sleeps.
  void wait(CollectiveWork& work) override;
  bool wait_until(CollectiveWork& work, ipc::Deadline deadline) override;

  void abort(const std::string& why) override;
  std::vector<Rank> missing() override;
  std::vector<Rank> behind() override;
  // Refuses new calls and lets the queued ones run until the deadline, then aborts them. Returns
  // when the queue is empty and its threads have ended.
  void close(ipc::Deadline deadline);

  bool has_failed() const { return failed_; }  // true: a caller knows that the group has failed
  std::mutex& mutex() override { return mutex_; }

 private:
  using Lock = std::unique_lock<std::mutex>;
  void run_next(Lock& lock, bool continues);
  void run_queued(Lock& lock);
  void ensure_thread();
  bool try_ensure_thread();
  void serve();
  void require_open(const Call& call) const;
  std::exception_ptr failure();

  std::shared_ptr<CallRunner> runner_;  // null once the queue is closed
  const ipc::ForkGuard fork_guard_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<CollectiveWorkPtr> waiting_;
  bool running_ = false, closed_ = false;
  std::atomic<bool> failed_{false};
  int idle_ = 0;  // threads that wait for a call to run
  std::vector<std::thread> threads_;
};

}  // namespace pycollect::dist
