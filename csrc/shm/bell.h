// What the threads of a rank sleep on until another process has done something for it. Whoever does
// something looks whether anybody sleeps, which costs one read of a line that hardly ever changes,
// and asks the kernel only then.
#pragma once
#include "wait.h"

namespace pycollect::shm {

// Lies in shared memory; all zeros is the state to begin with.
//
// A sleeper counts itself first and looks for something to do second; a ringer does something first
// and looks for sleepers second. All of that is sequentially consistent, so one of the two sees the
// other: what a ringer does must end in such a store, and what a sleeper looks at be loaded so.
class alignas(128) Bell {
 public:
  void ring() {
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
    rings_.fetch_add(1, std::memory_order_seq_cst);
    wake_sleepers(rings_);
  }
  // Sleeps until somebody rings, or the time is over, unless `busy` finds something to do.
  // `at_most` says how long, of what is the case when a ring would be heard.
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
static_assert(sizeof(Bell) == 128);

}  // namespace pycollect::shm
