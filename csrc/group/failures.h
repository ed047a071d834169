// How a group fails: each rank finds peers that have died, and the first one that finds a failure
// publishes the cause in shared memory, so that every rank throws the same message.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <semaphore>
#include <string>
#include <thread>

#include "segment_layout.h"
#include "system.h"
#include "wait.h"

namespace pycollect::ipc {

struct AbortCause {
  uint32_t kind = AbortRecord::lost;  // or timed_out
  std::string text = {};
  uint64_t first_call = 0;  // the calls before it are spared
};

// Throws Timeout or PeerLost. `kind`: as AbortCause::kind.
[[noreturn]] void throw_failure(uint32_t kind, const std::string& why);

// Abort state: whether the group is aborted and why, in shared memory.
class AbortState {
 public:
  AbortState(AbortRecord& record, std::string group) : record_(record), group_(std::move(group)) {}

  bool is_aborted() const {
    return record_.state.load(std::memory_order_acquire) != AbortRecord::healthy;
  }
  // Whether the group's abort ends the call with this number.
  bool ends(uint64_t call) const {
    return is_aborted() && call + 1 >= record_.first_call.load(std::memory_order_acquire);
  }
  // Aborts the group; if it is aborted already, keeps that cause, with the lower first call.
  // `found_in` is the operation that detected the failure, or null.
  void set(const AbortCause& cause, const OpContext* found_in);
  // Throws the published cause as PeerLost or Timeout.
  [[noreturn]] void rethrow(const OpContext& context) const;
  [[noreturn]] void rethrow() const;  // for failures during construction of the group
  AbortCause cause() const;           // of an aborted group
  std::string name(const OpContext& context) const;  // "all_reduce #17 of group 'default'"

 private:
  AbortRecord& record_;
  const std::string group_;
};

// Finds peers that have died or called exec. Each rank holds a robust futex, which the kernel
// releases when the rank ends, also across containers. Unlike a heartbeat, the futex costs no work,
// does not report a stopped process as dead, and is not kept alive by a forked child. Unlike a
// pidfd, it reports a death before a GPU driver has cleaned up.
class FailureDetector {
 public:
  // Returns when a dedicated thread holds this rank's lock. The thread is dedicated because the
  // kernel releases a robust futex when its thread ends, and other threads may end earlier.
  FailureDetector(Control& control, int world, Rank me);
  ~FailureDetector();

  // Returns a mask with bit r set if rank r is dead; callable from any thread. A rank that has not
  // arrived yet or has left is not dead.
  uint64_t dead() const;
  pid_t pid(Rank r) const { return control_.liveness[r].pid.load(std::memory_order_acquire); }

 private:
  Control& control_;
  const int world_;
  const ForkGuard fork_guard_;
  std::binary_semaphore end_{0};  // of the thread
  std::unique_ptr<std::thread> lock_holder_;
};

}  // namespace pycollect::ipc
