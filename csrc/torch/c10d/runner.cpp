// See runner.h. What a call does not come to because of an error, no rank comes to.
#include "runner.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <thread>

#include "../threads.h"

namespace pycollect::dist {

cpu::ParallelFor threads_of_rank(int ranks) {
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  const int share = std::max(1, cores / ranks);
  return [share](int64_t size, int64_t grain, const cpu::Body& body) {
    const int64_t most = std::min(share, at::get_num_threads());
    if (most <= 1 || size <= grain) return body(0, size);
    threads()(size, std::max(grain, (size + most - 1) / most), body);
  };
}

// The caller has its error, and does not want another one.
void Runner::refuse(const Call& call, shm::Deadline deadline) {
  try {
    shm::refuse(*group_, call.collective, calls_++, deadline, call.refusal);
  } catch (const std::exception&) {
    // The group is broken, and the next call says so.
  }
}

std::vector<Rank> Runner::missing() const {
  const auto done_by = [&](Rank r) { return group_->line(r).done.load(std::memory_order_relaxed); };
  const uint64_t own = done_by(group_->rank());
  const uint64_t entered = shm::at_run(own >> shm::kTaskBits) + 1;
  std::vector<Rank> ranks;
  if (!shm::reached(own, entered)) return ranks;  // nothing runs
  for (Rank r = 0; r < group_->world(); ++r)
    if (!shm::reached(done_by(r), entered)) ranks.push_back(r);
  return ranks;
}

void Runner::run(Call& call) {
  const shm::Deadline deadline = shm::Clock::now() + call.timeout;
  if (!call.refusal.empty()) return refuse(call, deadline);
  for (const shm::Request& request : call.requests)
    shm::run(*group_, request, calls_++, deadline, parallel_for_);
  for (const auto& [to, from] : call.copies) lay(to, from);
}

}  // namespace pycollect::dist
