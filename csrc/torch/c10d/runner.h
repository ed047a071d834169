// Runs the calls of one group, one at a time, and numbers them as all its ranks do.
#pragma once
#include <memory>

#include "call.h"

namespace pycollect::dist {

// As many of torch's threads as one rank may use of the cores that `ranks` share.
cpu::ParallelFor threads_of_rank(int ranks);

class Runner {
 public:
  explicit Runner(std::shared_ptr<shm::Group> group)
      : group_(std::move(group)), parallel_for_(threads_of_rank(group_->world())) {}

  void operator()(Call& call);

 private:
  void refuse(const Call& call, shm::Deadline deadline);

  const std::shared_ptr<shm::Group> group_;
  const cpu::ParallelFor parallel_for_;
  uint64_t calls_ = 0;
};

}  // namespace pycollect::dist
