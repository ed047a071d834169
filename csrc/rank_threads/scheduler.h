// Schedules ranks that are threads of one process. By default one rank runs at a time, until it
// waits, and the next one that can continue has its turn; so a run is reproducible. When all ranks
// wait and none can continue, that is a deadlock, and every wait throws at once. Uses neither torch
// nor Python.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../group/wait.h"
#include "../plan/plan.h"
#include "loop_share.h"
#include "thread_activity.h"

namespace pycollect::rank_threads {

using ipc::Clock;
using ipc::Deadline;

// What a thread waits for.
struct ReadyCondition {
  // Called by any thread, with the scheduler locked. Must not throw.
  std::function<bool()> ready;
  std::function<std::string()> describe;  // "all_reduce #3 of group 'default'"
  Deadline deadline = Deadline::max();
  // The caller's own limit: if no rank can continue, it is over, and that is no deadlock.
  bool is_limited = false;
  // A thread that no rank has started may make it hold: there is no deadlock while one works.
  bool is_open = false;
};

enum class MemberState {
  absent,  // has not entered
  queued,  // wants a turn, and waits for nothing else
  running,
  waiting,
  outside,  // has lost its turn in a wait that the scheduler does not know
  ended
};

// What a waiting member waits for.
struct PendingWait {
  const ReadyCondition* condition = nullptr;
  bool yields = false;    // it continues if no other member can
  bool expired = false;   // the condition's deadline is over
  bool released = false;  // granted because no other member can continue
};

// A thread of a launch as the scheduler sees it: the main thread of a rank, or a helper.
struct Member {
  Rank rank;
  const bool is_main;
  std::atomic<MemberState> state{MemberState::absent};  // changed with the scheduler locked
  bool sleeps = false;                                  // in `granted`
  PendingWait pending = {};
  std::condition_variable granted = {};
  std::vector<std::function<void()>> callbacks = {};  // run at the beginning of the next turn
  std::atomic<bool> at_work{false};
  ThreadActivity activity = {};

  bool waits() const { return state == MemberState::waiting; }
};

// Why a launch, or a group of its ranks, has been aborted.
enum class AbortKind { peer_lost, deadlock, timed_out };
struct LaunchAbort {
  AbortKind kind;
  std::string cause;
};
// Returns the exception PeerLost, Deadlock or Timeout.
std::exception_ptr make_abort_error(AbortKind kind, const std::string& why);

// Runs a callback. Its errors are its future's: torch keeps them there.
void run_callback(const std::function<void()>& callback);

// Calls `f` without the lock.
template <class F>
void unlocked(std::unique_lock<std::mutex>& lock, F&& f) {
  struct Relock {
    std::unique_lock<std::mutex>& lock;
    ~Relock() { lock.lock(); }
  };
  lock.unlock();
  const Relock relock{lock};
  f();
}

class LaunchListener {
 public:
  virtual ~LaunchListener() = default;
  virtual void abort(AbortKind kind, const std::string& cause) = 0;
  virtual void poll() = 0;  // called several times a second
};

class RankScheduler : public std::enable_shared_from_this<RankScheduler> {
 public:
  // A rank's state that the process has only once, such as that of random generators. Not called if
  // the ranks run in parallel.
  struct RankHooks {
    std::function<void(Rank)> pause, resume;     // at the end and at the beginning of a turn
    std::function<std::string(Rank)> find_line;  // line of the user's code at which the rank is
  };
  RankScheduler(int world, bool parallel, RankHooks hooks);
  ~RankScheduler();
  RankScheduler(const RankScheduler&) = delete;
  RankScheduler& operator=(const RankScheduler&) = delete;

  // Returns the scheduler of the launch to which the calling thread belongs; null: none.
  static std::shared_ptr<RankScheduler> of_thread();
  int world() const { return world_; }
  // Rank of the calling thread if that is one of this launch, or a thread that a rank has started;
  // else -1.
  Rank rank_of_thread() const;

  // The calling thread becomes the rank, and waits until all ranks have entered and it has a turn.
  void enter(Rank rank);
  // The calling thread is no longer the rank, which has returned or failed.
  void leave();
  // The calling thread belongs to the rank besides its main thread; it needs no turn.
  void enter_helper(Rank rank) { become(add_helper(rank)); }
  // The same in two parts: add_helper() counts a helper before its thread starts, which then calls
  // become(). remove_helper() is for one whose thread could not start.
  Member* add_helper(Rank rank);
  void become(Member* helper);
  void remove_helper(Member* helper);
  void leave_helper();

  // Waits until the condition holds, on behalf of the rank. Returns false at the deadline. Throws
  // Deadlock if no rank can continue, and the cause if the launch has been aborted.
  bool wait(Rank rank, const ReadyCondition& condition);
  // Lets other ranks run until the condition holds or none of them can continue. Returns whether it
  // holds.
  bool yield_until(Rank rank, const ReadyCondition& condition);
  // Ends the turn of a rank that may wait for another one in a way that the scheduler does not
  // know.
  void let_others_run(Rank rank);
  // Waits until every rank has called it; rank 0 is the first to continue.
  void align(Rank rank);
  // Ends the turn of a rank that could continue: the other ranks that can do so go first, from rank
  // 0 on, so that after a collective the ranks continue in their order.
  void yield_in_order(Rank rank);
  // Waits for a turn if the calling thread has lost its own in a wait that the scheduler does not
  // know. Throws the cause if the launch has been aborted.
  void require_turn(Rank rank, const std::string& operation);
  // The same for any thread, without the exception.
  void regain_turn();

  // Locks the state that conditions read. After a change, call notify() with the lock.
  std::mutex& mutex() { return mutex_; }
  void notify() { dispatch(); }
  // Runs a callback of the rank: on the rank's thread when that next has a turn, or on a
  // new thread if the rank does not wait for one. Call without the lock.
  void run_as(Rank rank, const std::function<void()>& callback);
  // Runs `callback` as the rank on a new thread, at once. While it is at work, there is no
  // deadlock.
  void run_on_thread(Rank rank, std::function<void()> callback);

  // Loops of the rank that has a turn, on which ranks that wait can work, too.
  LoopShare& loop_share() { return share_; }

  // Marks a time in which the calling thread may seem to sleep, but is at work.
  class AtWork {
   public:
    explicit AtWork(const RankScheduler& scheduler);
    ~AtWork();
    AtWork(const AtWork&) = delete;
    AtWork& operator=(const AtWork&) = delete;

   private:
    Member* const member_;
  };

  // Looks for ranks that are blocked in waits that the scheduler does not know, such as locks: they
  // lose their turns, and can be part of a deadlock. Call several times a second.
  void poll();

  // Counts objects whose waits the scheduler does not know: torch's futures. While there are any, a
  // rank that sleeps loses its turn. Call with the lock.
  void count_unknown_waits(int more);

  // Returns a line for each rank: what it waits for, and where the user's program is. Call without
  // the lock.
  std::string describe_ranks();

  // Adds an object that is told when the launch is aborted, at once if it is already. Call without
  // the lock.
  void add_listener(const std::shared_ptr<LaunchListener>& listener);
  // Tells the listener why the launch has been aborted, if that has not been done yet. Call without
  // the lock, after a wait has thrown.
  void pass_on_abort(LaunchListener& listener) const { listener.abort(abort_.kind, abort_.cause); }
  // Returns why the launch has been aborted, or `own` if it has not: what ranks do because of the
  // abort, such as leaving their groups, is not the cause. Call with the lock.
  LaunchAbort abort_or(LaunchAbort own) const { return aborted_ ? abort_ : std::move(own); }
  // Ends the launch: every wait throws `cause`.
  void abort(AbortKind kind, const std::string& cause);
  bool is_aborted();
  [[noreturn]] void throw_cause(const std::string& operation) const;  // of the abort

 private:
  using Lock = std::unique_lock<std::mutex>;
  enum class WaitMode { until_ready, yield, in_order };
  bool wait(Rank rank, const ReadyCondition& condition, WaitMode mode);
  bool park(Lock& lock, Member& me, WaitMode mode);
  void end_turn(Lock& lock, Member& me, Rank last);
  void begin_turn(Lock& lock, Member& me);
  void take_turn(Lock& lock, Member& me);
  void regain_turn(Lock& lock, Member& me);
  void sleep(Lock& lock, Member& me);
  void poll_if_first(Lock& lock, const Member& me);
  void take_turns_of_blocked(Lock& lock);
  bool expects_unknown_waits() const { return unknown_waits_ > 0 || !helpers_.empty(); }
  void wake_pollers();
  bool can_continue(const Member& member) const;
  void grant(Member& member);
  void dispatch();
  Member* next();
  Member* first_limited();
  void end_in_deadlock(Lock& lock);
  bool all_stuck();
  bool is_stuck(Member& member);
  std::vector<pid_t> others() const;
  bool others_run() const;
  bool others_stuck();
  void abort(AbortKind kind, const std::string& cause, Lock& lock);
  std::string describe_ranks(Lock& lock);

  const int world_;
  const bool parallel_;
  const int turns_;  // number of ranks that run at a time
  const RankHooks hooks_;
  const pid_t launcher_;  // the thread that waits for the ranks
  const std::map<pid_t, ThreadActivity::Sleep> usual_sleeps_;  // of threads, before the launch
  LoopShare share_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Member>> ranks_;
  std::vector<Member*> helpers_;          // threads that are not a rank's main thread, and wait
  std::vector<Member*> entered_helpers_;  // helpers that have entered, also while they wait
  int entered_ = 0;                       // ranks that have entered
  int aligned_ = 0;                       // ranks that have called align()
  int running_ = 0;                       // ranks that have a turn
  Rank last_;                             // the rank whose turn has ended last
  int unknown_waits_ = 0;
  std::map<pid_t, ThreadActivity> others_;  // threads of no rank
  bool deadlocked_ = false, aborted_ = false;
  LaunchAbort abort_;  // if it has been aborted
  std::vector<std::weak_ptr<LaunchListener>> listeners_;
};

}  // namespace pycollect::rank_threads
