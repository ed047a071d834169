// Runs the calls of one group one at a time, and gives each the same number on all ranks.
#pragma once
#include <memory>

#include "../../rank_executor/executor.h"
#include "work.h"

namespace pycollect::dist {

// Returns the parallel loop of a rank: torch's threads, limited to `share`, the rank's share of the
// cores.
cpu::ParallelFor threads_of_rank(int share);

// Truncates a refusal to the length that can be published to the other ranks.
std::string truncated(std::string_view why);
// Makes the call publish `why` as its refusal, instead of running.
void refuse_for(GroupCall& call, const std::exception& why);

// Makes all ranks agree on the calls of all works before the first one runs.
void coalesce(const std::vector<CollectiveWorkPtr>& works);

class CallRunner {
 public:
  // `executor` may refer to the group.
  CallRunner(std::shared_ptr<ipc::Group> group, std::unique_ptr<ipc::CollectiveExecutor> executor)
      : group_(std::move(group)), executor_(std::move(executor)) {}

  void run(GroupCall& call);
  void abort(const std::string& why) { group_->abort(why); }  // thread-safe
  void time_out(const std::string& why) {                     // thread-safe
    group_->abort({ipc::AbortRecord::timed_out,
                   text("rank ", group_->world_rank(group_->rank()), " timed out: ", why),
                   group_->call()});
  }
  // Ranks of this host that have not begun the call that this one is in; thread-safe.
  std::vector<Rank> missing() const;

 private:
  void run(GroupCall& call, ipc::Deadline deadline);
  void refuse(const GroupCall& call, ipc::Deadline deadline);
  void or_refuse(GroupCall& call, ipc::Deadline deadline, c10::function_ref<void()> act);
  void agree_on_all(GroupCall& call, ipc::Deadline deadline);
  void agree(const std::vector<const ipc::CollectiveRequest*>& requests, ipc::Deadline deadline);
  void fill(GroupCall& call, ipc::Deadline deadline);
  void perform(GroupCall& call, ipc::Deadline deadline);
  void exchange_entries(GroupCall& call, ipc::Deadline deadline);
  void await_inputs(GroupCall& call, TensorStaging& staging, ipc::Deadline deadline);

  const std::shared_ptr<ipc::Group> group_;
  const std::unique_ptr<ipc::CollectiveExecutor> executor_;
  uint64_t calls_ = 0;
};

}  // namespace pycollect::dist
