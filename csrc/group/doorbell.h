// Doorbell: a futex on which the threads of a rank sleep until another process has work for them.
// Ringing costs one load of a line that hardly ever changes; the kernel is called only if a thread
// sleeps.
#pragma once
#include "wait.h"

namespace pycollect::ipc {

// Doorbell in shared memory; all zeros is the initial state.
//
// A sleeper counts itself first and checks for work second; a ringer publishes work first and reads
// the number of sleepers second. With sequential consistency, at least one of the two sees the
// other's write: the ringer must publish with a seq_cst store, and the sleeper must check with
// seq_cst loads.
class alignas(128) Doorbell {
 public:
  void ring() {
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
    rings_.fetch_add(1, std::memory_order_seq_cst);
    wake_sleepers(rings_);
  }
  // Sleeps until the doorbell rings or `at_most()` is over, unless `busy()` finds work. Both are
  // called after this thread is counted as a sleeper, when a ring would wake it.
  template <class AtMost, class Busy>
  void sleep(const AtMost& at_most, const Busy& busy) {
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    const uint64_t seen = rings_.load(std::memory_order_seq_cst);
    if (!busy()) sleep_on(rings_, seen, at_most());
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

 private:
  std::atomic<uint64_t> rings_{0};
  std::atomic<uint32_t> sleepers_{0};
};
static_assert(sizeof(Doorbell) == 128);

}  // namespace pycollect::ipc
