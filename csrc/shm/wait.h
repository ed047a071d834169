// Backoff of a wait for another process: spin while that process can be running, then yield the
// core, and sleep in the kernel only when the wait has lasted long.
#pragma once
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>

#include "../bootstrap/store.h"

namespace pycollect::shm {

// Operation context of a wait: its deadline, and what error messages name.
struct OpContext {
  const char* operation;  // "all_reduce"
  uint64_t call;          // its sequence number
  Deadline deadline;
};

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleeps until the word's sleepers are woken, the word no longer holds `seen`, or the time is over.
// Compares the lower 32 bits: if the word advances by 2^32 while a thread falls asleep, the thread
// sleeps the whole time.
void sleep_on(const std::atomic<uint64_t>& word, uint64_t seen, std::chrono::nanoseconds at_most);
void wake_sleepers(const std::atomic<uint64_t>& word);

// How long to spin. The awaited rank has a core of its own and is running: yielding made the
// scheduler put both ranks on one core (1.5 us an exchange instead of 0.18). 20 to 100 us measured
// alike.
inline constexpr std::chrono::microseconds kSpinning{50};
// Pauses between checks of the clock and of core sharing: longer than an exchange takes.
inline constexpr int kPausesPerLook = 32;
// Pauses of a spin with more ranks than cores: the awaited rank is unknown and probably not
// running. 0 and 20 measured alike; 200 made a small all_reduce of 4 ranks on 2 cores 3 times as
// slow.
inline constexpr int kPausesWhenCrowded = 16;
// How long to yield before sleeping. A kernel wake-up takes 35 us: under 2 % of a wait this long.
inline constexpr std::chrono::milliseconds kYielding{2};
inline constexpr int kTurnsPerLook = 8;  // yields per clock read, which costs a tenth of a yield
// How often to check liveness, deadline, and abort state. Takes 1 us for 8 ranks, 10 us for 64.
inline constexpr std::chrono::milliseconds kLooking{1};
// The longest sleep before the next check: a twentieth of the second within which a death must be
// noticed.
inline constexpr std::chrono::milliseconds kSleeping{50};

// Spins for a short time; returns true if `ready` held. `vain` returns true if the awaited rank
// cannot run while this thread spins.
template <class Ready, class Vain>
bool spin(bool crowded, const Ready& ready, const Vain& vain) {
  if (crowded) {
    for (int i = 0; i < kPausesWhenCrowded; ++i, pause())
      if (ready()) return true;
    return false;
  }
  for (Deadline end = Deadline::max();;) {
    for (int i = 0; i < kPausesPerLook; ++i, pause())
      if (ready()) return true;
    const auto now = Clock::now();  // not before: most waits are over by then
    if (end == Deadline::max()) end = now + kSpinning;
    if (now >= end || vain()) return false;
  }
}

// Waits until `ready`, after `spin`. `look(now)` is called now and then and throws when waiting has
// become pointless; `sleep(waited)` is the last stage. Before that stage the core is yielded
// whenever `vain` returns true, and after kSpinning always.
template <class Ready, class Vain, class Look, class Sleep>
void wait(const Ready& ready, const Vain& vain, const Look& look, const Sleep& sleep) {
  const auto begin = Clock::now();
  for (auto now = begin, looked = begin; now - begin < kYielding; now = Clock::now()) {
    if (now - looked >= kLooking) look(looked = now);
    const bool spins = now - begin < kSpinning;
    for (int i = 0; i < kTurnsPerLook; ++i) {
      if (!spins || vain())
        sched_yield();
      else
        for (int p = 0; p < kPausesPerLook && !ready(); ++p) pause();
      if (ready()) return;
    }
  }
  while (!ready()) {
    const auto now = Clock::now();
    look(now);
    sleep(now - begin);
  }
}

}  // namespace pycollect::shm
