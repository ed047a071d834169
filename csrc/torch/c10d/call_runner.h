// Runs the calls of one group one at a time, and numbers them alike on all of its ranks.
#pragma once
#include <memory>

#include "../../transport/shm_transport.h"
#include "call.h"

namespace pycollect::dist {

// Parallel loop for one of `ranks` ranks on this host, with its share of cores and torch's threads.
cpu::ParallelFor threads_of_rank(int ranks);

// Truncates a refusal to the length that can be published to the other ranks.
std::string shortened(std::string_view why);
// Makes the call publish `why` as its refusal, instead of running.
void refuse_for(Call& call, const std::exception& why);

class CallRunner {
 public:
  explicit CallRunner(std::shared_ptr<shm::Group> group)
      : group_(std::move(group)), host_(*group_, threads_of_rank(group_->world())) {}

  void run(Call& call);
  // Thread-safe. Abort the running call; return the ranks that have not begun it.
  void abort(const std::string& why) { group_->abort(why); }
  std::vector<Rank> missing() const;

 private:
  void refuse(const Call& call, shm::Deadline deadline);
  void agree_on_all(Call& call, shm::Deadline deadline);
  void agree(const std::vector<CoalescedAgreement::BoundRequest>& requests, shm::Deadline deadline);
  void fill(Call& call, shm::Deadline deadline);
  void perform(Call& call, shm::Deadline deadline);
  shm::Transport& transport(const Call& call);
  void await_arrival(Call& call, TensorStaging& staging, shm::Deadline deadline);

  const std::shared_ptr<shm::Group> group_;
  shm::ShmTransport host_;
  uint64_t calls_ = 0;
};

}  // namespace pycollect::dist
