// A group whose ranks are threads of this process. The calls that the ranks make at the same place
// in their order run together, as soon as the last rank has made its call, on that rank's thread.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../../../rank_threads/scheduler.h"
#include "../work.h"

namespace pycollect::dist {

using rank_threads::AbortKind;
using rank_threads::LaunchAbort;
using rank_threads::RankScheduler;
using rank_threads::ReadyCondition;

// What one rank posts at one place of its order of calls: calls that run all or not at all, or the
// reason why it refuses to make a call.
struct PostedCalls {
  std::vector<CollectiveWorkPtr> works = {};
  CollectiveWorkPtr refused = {};
};

// A work for which ranks did not post their side in time.
struct OverdueWork {
  std::string operation;
  std::vector<Rank> late;
  std::chrono::duration<double> waited;
};

class ThreadMailbox;

class ThreadGroup final : public rank_threads::LaunchListener {
 public:
  ThreadGroup(std::shared_ptr<RankScheduler> scheduler, std::string name, int world);

  RankScheduler& scheduler() const { return *scheduler_; }
  const std::string& name() const { return name_; }
  int world() const { return world_; }
  std::mutex& mutex() const { return scheduler_->mutex(); }

  // Adds a rank, and waits for all others. Throws std::invalid_argument, on all ranks alike, if
  // their settings differ; Timeout at the deadline.
  void join(Rank rank, const std::string& settings, ipc::Deadline deadline);
  // The rank makes no more calls. Those that it has made can still run.
  void leave(Rank rank);

  // Returns whether it has run calls of the ranks.
  bool post(Rank rank, PostedCalls calls);
  // A wait until a work is done, for which ranks must post their side.
  struct GroupWait {
    const GroupWork& work;
    // Both are called with the mutex locked.
    std::function<std::vector<Rank>()> needed;  // ranks that have not posted their side
    std::function<std::string()> describe;
    ipc::Deadline deadline;
    bool is_limited;  // see ReadyCondition
  };
  // Waits on behalf of a rank until the work is done or a needed rank has left. Then, and at the
  // deadline, aborts the group and throws. Does not return while a thread uses the work's tensors.
  void wait(Rank rank, const GroupWait& wait);
  // Like wait(), but returns false at the deadline.
  bool wait_until(Rank rank, const GroupWait& wait);
  // Lets other ranks run until the work is done or none can continue. Aborts the group if a needed
  // rank has left.
  void yield_until(Rank rank, const GroupWait& wait);
  // Lets the ranks continue in their order.
  void yield_in_order(Rank rank) { scheduler_->yield_in_order(launch_ranks_[rank]); }
  // Waits for this thread's turn, and throws if the group or the launch has been aborted.
  void require_healthy(Rank rank, const std::string& operation) const;
  void abort(Rank rank, const std::string& why);
  void abort(AbortKind kind, const std::string& cause) override;
  // Aborts the group if the future of a work is due.
  void poll() override;
  // Wakes the waits of works that are done. Call with the mutex locked.
  void notify();
  // Returns the reason if the group has been aborted: no work may begin to run. Call with the mutex
  // locked.
  std::exception_ptr aborted() const { return aborted_ ? cause() : nullptr; }

  // Ranks that have not made the call that is the next to run. Call with the mutex locked.
  std::vector<Rank> missing() const;
  // Ranks that have made fewer calls than this one. Call with the mutex locked.
  std::vector<Rank> behind(Rank rank) const;
  // Ranks that have not made the call of this work. Call with the mutex locked.
  std::vector<Rank> missing(const CollectiveWork& work) const;
  // Returns "all_reduce #3 of group 'default' on [2, 3] float32". Call with the mutex locked.
  std::string describe(CollectiveWork& work) const;

  // Completes the future of a work of this rank. Call without the mutex.
  void complete_later(Rank rank, c10::intrusive_ptr<Future> future,
                      const c10::intrusive_ptr<GroupWork>& work);
  // Runs `callback` as the rank on a new thread.
  void run_on_thread(Rank rank, std::function<void()> callback);
  // See RankScheduler::count_unknown_waits.
  void count_open_futures(int more) { scheduler_->count_unknown_waits(more); }

  ThreadMailbox& mailbox() const { return *mailbox_; }

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct JointCall {  // what all ranks post at one place of their order
    std::vector<std::optional<PostedCalls>> by_rank;
    int arrived = 0;
  };
  std::vector<Rank> missing(const JointCall& joint) const;
  bool run_joint_calls(Lock& lock);
  std::exception_ptr run(const JointCall& joint, uint64_t number);
  std::vector<Rank> lost(const GroupWait& wait) const;  // needed ranks that have left
  void abort_if_lost(Lock& lock, const GroupWait& wait);
  void await_end(Lock& lock, const GroupWork& work);
  std::optional<OverdueWork> find_due(ipc::Deadline now) const;
  void time_out(Lock& lock, const OverdueWork& work, const std::string& report);
  using Completions = std::vector<std::function<void()>>;  // each completes a future
  using ErrorOfWork = std::function<std::exception_ptr(CollectiveWork&)>;
  Completions finish(const JointCall& joint, const ErrorOfWork& error_of);
  ErrorOfWork error_of_abort() const;  // names each work's operation
  static void complete_all(const Completions& completions);
  void require_own(Rank rank, const std::function<std::string()>& describe) const;
  void require_own(Rank rank, const GroupWait& wait) const;
  void abort(Lock& lock, AbortKind kind, const std::string& cause);
  std::exception_ptr cause(const std::string& operation = {}) const;

  const std::shared_ptr<RankScheduler> scheduler_;
  const std::string name_;
  const int world_;
  const std::shared_ptr<ThreadMailbox> mailbox_;
  // The members below are guarded by the mutex.
  std::vector<Rank> launch_ranks_;  // [rank]; -1: has not joined
  std::vector<std::string> settings_;
  int joined_ = 0;
  std::vector<bool> left_;
  bool any_left_ = false;
  std::deque<JointCall> joint_calls_;  // from the next one that runs on
  std::vector<uint64_t> next_;         // [rank]: number of the joint call to which it posts next
  uint64_t first_ = 0;                 // number of joint_calls_.front()
  bool running_ = false;               // a thread runs joint calls
  std::condition_variable ended_;      // works that a thread has run
  bool aborted_ = false;
  LaunchAbort abort_;  // if it has been aborted
};

}  // namespace pycollect::dist
