// How to wait for another process: pauses where it can be running, then the core is offered to it,
// and the kernel is asked to wake only when that has gone on for long.
#pragma once
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>

#include "board.h"

namespace pycollect::shm {

// What somebody waits in, for the message when it fails.
struct Occasion {
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

// Sleeps until somebody wakes the word's sleepers, it no longer holds `seen`, or the time is over.
// Compares the lower halves: the word moves on by less than 2^32 while somebody falls asleep, or he
// sleeps the whole time.
void sleep_on(const std::atomic<uint64_t>& word, uint64_t seen, std::chrono::nanoseconds at_most);
void wake_sleepers(const std::atomic<uint64_t>& word);

// Who is awaited has a core of its own: it is running, and leaving the core to nobody made the
// scheduler put both ranks on one (1.5 us an exchange instead of 0.18). 20 to 100 us measured
// alike.
inline constexpr std::chrono::microseconds kSpinning{50};
// Then the clock is read, and who has come to share this core: longer than what an exchange takes.
inline constexpr int kPausesPerLook = 32;
// More ranks than cores, and nobody knows whom this wait is for: it probably is not running. 0 and
// 20 measured alike, 200 made a small all_reduce of 4 ranks on 2 cores 3 times as slow.
inline constexpr int kPausesWhenCrowded = 16;
// A wake-up by the kernel takes 35 us: under 2 % of a wait that has lasted so long.
inline constexpr std::chrono::milliseconds kYielding{2};
inline constexpr int kTurnsPerLook = 8;  // at the clock: a tenth of what a yield takes
// How often to look who is alive, what time it is, and whether the group is whole. Takes 1 us for 8
// ranks, 10 for 64.
inline constexpr std::chrono::milliseconds kLooking{1};
// The longest sleep, after which one looks again: a twentieth of the second in which a death must
// be noticed.
inline constexpr std::chrono::milliseconds kSleeping{50};

// `vain` tells that who is awaited cannot run as long as this goes on.
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

// Until `ready`, after spinning. `look(now)` is called now and then and throws when there is no
// more sense in waiting; `sleep(waited)` is what to do in the last stage. Before that the core is
// offered to others whenever it is `vain` to hold it, and after kSpinning always.
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
