// Queue of a group whose ranks are processes. A thread that waits for a queued call runs the queue
// up to and including that call; otherwise a thread of the queue does.
//
// Order of the calls: those that callbacks of a call's future make come directly after that call,
// and the call behind them begins when the callbacks have returned. So all ranks have the same
// order, whichever thread runs the callbacks, and however early.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <thread>

#include "../../group/system.h"
#include "call_runner.h"
#include "work.h"

namespace pycollect::dist {

class ProcessQueue final : public WorkOwner, public std::enable_shared_from_this<ProcessQueue> {
 public:
  explicit ProcessQueue(std::shared_ptr<CallRunner> runner) : runner_(std::move(runner)) {}

  // See RankCommunicator. Runs the call on this thread if no call is before it; else enqueues it.
  void run(const CollectiveWorkPtr& work);
  void push_all(const std::vector<CollectiveWorkPtr>& works);
  std::vector<Rank> behind();

  // wait() runs queued calls on this thread until the work is done; wait_until() only sleeps. Both
  // throw what a signal handler raises (see interpreter.h), after the group has been aborted.
  void wait(GroupWork& work) override;
  bool wait_until(GroupWork& work, ipc::Deadline deadline) override;

  void abort(const std::string& why) override;
  std::string describe(GroupWork& work) override { return dist::describe(work, missing()); }
  void on_future_taken() override { futures_ = true; }
  // Refuses new calls and lets the queued ones run until the deadline or until a signal handler
  // raises, then aborts them. Returns when the queue is empty and its threads have ended. Returns
  // what the handler has raised, or null.
  std::exception_ptr close(ipc::Deadline deadline);

  std::mutex& mutex() override { return mutex_; }

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Works = std::deque<CollectiveWorkPtr>;
  // The callbacks of one call while they run, and the calls that they have made.
  struct CallbackScope {
    const ProcessQueue* queue;
    const CollectiveWorkPtr& of;
    uint64_t id;
    ipc::Deadline moved;  // when the callbacks began, or the last call that they have made ended
    Works waiting = {};
    bool returned = false;      // the calls that are left come first, all the same
    int waits_outside = 0;      // > 0: the callbacks wait for a call that they have not made
    CallbackScope* outer = {};  // whose callback runs these callbacks, on this thread
    static inline thread_local CallbackScope* innermost = nullptr;
  };
  class WaitingInCallback;  // defined in process_queue.cpp

  std::exception_ptr run_next(Lock& lock, bool continues);
  void begin_run();
  void end_run();
  bool may_run();
  bool runs_here() const { return running_ && runner_thread_ == std::this_thread::get_id(); }
  void require_not_inside(const char* name) const;
  void end_interrupted(Lock& lock, GroupWork& work);
  void run_callbacks(Lock& lock, const CollectiveWorkPtr& work, c10::intrusive_ptr<Future> future,
                     std::exception_ptr error);
  void run_queued(Lock& lock);
  void sleep(Lock& lock, ipc::Deadline deadline);
  void ensure_thread();
  bool try_ensure_thread();
  void serve();
  void require_open(const GroupCall& call) const;
  std::vector<Rank> missing();  // ranks that have not begun the running call
  std::exception_ptr failure(const GroupCall& call, std::exception_ptr* raised);
  CallbackScope* scope_of_thread() const;
  bool is_next(const CallbackScope* scope) const;
  Works* next();
  bool is_empty() const;
  void abort_queue(Lock& lock, bool late);
  std::exception_ptr close_inside(Lock& lock);

  std::shared_ptr<CallRunner> runner_;  // null once the queue is closed
  std::mutex mutex_;
  std::condition_variable changed_;
  Works waiting_;                       // calls that no callback has made
  std::list<CallbackScope> callbacks_;  // the last one is of the latest call
  bool running_ = false, closed_ = false;
  std::thread::id runner_thread_ = {};  // the thread that runs a call
  uint64_t scopes_ = 0;                 // number of all CallbackScopes so far
  bool futures_ = false;                // the future of an unfinished call has been taken
  bool passes_callbacks_ = false;       // callbacks no longer hold up the calls behind them
  int idle_ = 0;                        // threads that wait for a call to run
  std::vector<std::thread> threads_;
};

}  // namespace pycollect::dist
