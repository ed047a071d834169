// Runs the calls of one group, one at a time, and numbers them as all its ranks do.
#pragma once
#include <memory>

#include "../../shm/host_transport.h"
#include "call.h"

namespace pycollect::dist {

// As many of torch's threads as one rank may use of the cores that `ranks` share.
cpu::ParallelFor threads_of_rank(int ranks);

// As much of a refusal as the other ranks can be told.
std::string shortened(std::string_view why);
// Has the call tell them so instead of running.
void refuse_for(Call& call, const std::exception& why);

class Runner {
 public:
  explicit Runner(std::shared_ptr<shm::Group> group)
      : group_(std::move(group)), host_(*group_, threads_of_rank(group_->world())) {}

  void run(Call& call);
  // From any thread: breaks what runs; and who has not come to it, if anybody has not.
  void abort(const std::string& why) { group_->abort(why); }
  std::vector<Rank> missing() const;

 private:
  void refuse(const Call& call, shm::Deadline deadline);
  void agree_on_all(Call& call, shm::Deadline deadline);
  void agree(const std::vector<Together::Bound>& requests, shm::Deadline deadline);
  void fill(Call& call, shm::Deadline deadline);
  void perform(Call& call, shm::Deadline deadline);
  shm::Transport& transport(const Call& call);
  void await_arrival(Call& call, Passage& passage, shm::Deadline deadline);

  const std::shared_ptr<shm::Group> group_;
  shm::HostTransport host_;
  uint64_t calls_ = 0;
};

}  // namespace pycollect::dist
