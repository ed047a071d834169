// Backoff of a wait for another process: spin while that process can be running, then yield the
// core, and sleep in the kernel only when the wait has lasted long.
#pragma once
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>

#include "../bootstrap/store.h"

namespace pycollect::ipc {

// Operation context of a wait: its deadline, and the operation that error messages name.
struct OpContext {
  const char* operation;  // "all_reduce"
  uint64_t call;          // its sequence number
  Deadline deadline;
  Deadline begun = Deadline::max();  // when the operation began, if its waits may begin later
};

// A base of what GroupSettings::check_signals throws. It passes through all handlers of errors.
struct Interruption {};

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

// How long to spin, if the awaited rank has a core of its own. Yielding earlier made the scheduler
// put both ranks on one core (1.5 us an exchange instead of 0.18). 20 to 100 us measured alike.
inline constexpr std::chrono::microseconds kSpinTime{50};
// Pauses between checks of the clock and of core sharing: longer than an exchange takes.
inline constexpr int kPausesPerCheck = 32;
// Pauses of a spin with more ranks than cores, when the awaited rank is probably not running. 0 and
// 20 measured alike; 200 made a small all_reduce of 4 ranks on 2 cores 3 times as slow.
inline constexpr int kPausesWhenCrowded = 16;
// How long to yield before sleeping. A kernel wake-up takes 35 us: under 2 % of a wait this long.
inline constexpr std::chrono::milliseconds kYieldTime{2};
inline constexpr int kYieldsPerCheck = 8;  // yields per clock read, which costs a tenth of a yield
// How often to check liveness, deadline, and abort state. Takes 1 us for 8 ranks, 10 us for 64.
inline constexpr std::chrono::milliseconds kCheckInterval{1};
// How often a waiting thread lets the program handle signals, such as Ctrl-C: a third of the time
// within which a user expects an answer.
inline constexpr std::chrono::milliseconds kSignalInterval{100};
// The longest sleep between checks: a twentieth of the second within which a death must be
// detected.
inline constexpr std::chrono::milliseconds kMaxSleep{50};

// Spins for a short time; returns true if `ready` held. `must_yield` returns true if the
// awaited rank cannot run while this thread spins.
template <class Ready, class MustYield>
bool spin(bool crowded, const Ready& ready, const MustYield& must_yield) {
  if (crowded) {
    for (int i = 0; i < kPausesWhenCrowded; ++i, pause())
      if (ready()) return true;
    return false;
  }
  for (Deadline end = Deadline::max();;) {
    for (int i = 0; i < kPausesPerCheck; ++i, pause())
      if (ready()) return true;
    const auto now = Clock::now();  // not read earlier: most waits end within the first pauses
    if (end == Deadline::max()) end = now + kSpinTime;
    if (now >= end || must_yield()) return false;
  }
}

// Waits until `ready` holds, after `spin`. Calls `check(now)` every kCheckInterval or so, which
// throws if the wait must fail. First yields the core whenever `must_yield` returns true, and after
// kSpinTime always; after `yield_time` calls `sleep(waited)`.
template <class Ready, class MustYield, class Check, class Sleep>
void wait(const Ready& ready, const MustYield& must_yield, const Check& check, const Sleep& sleep,
          std::chrono::microseconds yield_time = kYieldTime) {
  const auto begin = Clock::now();
  for (auto now = begin, checked = begin; now - begin < yield_time; now = Clock::now()) {
    if (now - checked >= kCheckInterval) check(checked = now);
    const bool spins = now - begin < kSpinTime;
    for (int i = 0; i < kYieldsPerCheck; ++i) {
      if (!spins || must_yield())
        sched_yield();
      else
        for (int p = 0; p < kPausesPerCheck && !ready(); ++p) pause();
      if (ready()) return;
    }
  }
  while (!ready()) {
    const auto now = Clock::now();
    check(now);
    sleep(now - begin);
  }
}

}  // namespace pycollect::ipc
