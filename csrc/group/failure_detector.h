// Failure detector: finds peers that have died or called exec. Each rank holds a robust futex,
// which the kernel releases when the rank ends, also across containers. Unlike a heartbeat, the
// futex costs no work, does not report a stopped process as dead, and is not kept alive by a forked
// child. Unlike a pidfd, it reports a death before a GPU driver has cleaned up.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <semaphore>
#include <thread>

#include "fork_guard.h"
#include "segment_layout.h"
#include "system.h"

namespace pycollect::ipc {

class FailureDetector {
 public:
  // Returns when a dedicated thread holds this rank's lock. The thread is dedicated because the
  // kernel releases a robust futex when its thread ends, and other threads may end earlier.
  FailureDetector(Control& control, int world, Rank me);
  ~FailureDetector();
  FailureDetector(const FailureDetector&) = delete;
  FailureDetector& operator=(const FailureDetector&) = delete;

  // Returns a mask with bit r set if rank r is dead; callable from any thread. A rank that has not
  // arrived yet or has left is not dead.
  uint64_t dead() const;
  pid_t pid(Rank r) const { return control_.liveness[r].pid.load(std::memory_order_acquire); }

 private:
  void hold(LivenessLock& mine);

  Control& control_;
  const int world_;
  const ForkGuard fork_guard_;
  int failed_ = 0;
  std::binary_semaphore lock_held_{0}, end_{0};
  std::unique_ptr<std::thread> lock_holder_;
};

}  // namespace pycollect::ipc
