// What waits for other processes have in common: deadlines, the context of an operation, how long a
// wait spins and yields, and words in shared memory on which a thread sleeps until a peer wakes it.
#pragma once
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <climits>
#include <cstdint>
#include <type_traits>

namespace pycollect::ipc {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

// Returns the timeout, or 0 or 100 years. Clocks count nanoseconds in 64 bits, and neither a sum of
// a time and a timeout nor its conversion to another clock may overflow.
inline std::chrono::milliseconds clamped(std::chrono::milliseconds timeout) {
  constexpr std::chrono::milliseconds kNone{0}, kLongest = std::chrono::hours(24 * 365 * 100);
  return std::clamp(timeout, kNone, kLongest);
}

inline Deadline deadline_after(std::chrono::milliseconds timeout) {
  return Clock::now() + clamped(timeout);
}

// Operation context of a wait: its deadline, and the operation that error messages name.
struct OpContext {
  const char* operation;  // "all_reduce"
  uint64_t call;          // its sequence number in the group
  Deadline deadline;
  Deadline begun = Deadline::max();  // when the operation began, if its waits may begin later
  uint64_t shown = call;  // its number in messages: of the user's call, of which it may be a part
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

// Refers to a callable, which must outlive it. Unlike a std::function it owns nothing. May be null.
template <class Signature>
class FunctionRef;
template <class Result, class... Args>
class FunctionRef<Result(Args...)> {
 public:
  FunctionRef() = default;
  template <class F>
    requires(std::is_invocable_r_v<Result, const F&, Args...> && !std::is_same_v<F, FunctionRef>)
  FunctionRef(const F& function)
      : function_(&function), call_([](const void* called, Args... args) -> Result {
          return static_cast<Result>((*static_cast<const F*>(called))(args...));
        }) {}
  Result operator()(Args... args) const { return call_(function_, args...); }
  explicit operator bool() const { return call_ != nullptr; }

 private:
  const void* function_ = nullptr;
  Result (*call_)(const void*, Args...) = nullptr;
};

// How long to yield before sleeping. A kernel wake-up takes 35 us: under 2 % of a wait this long.
inline constexpr std::chrono::milliseconds kYieldTime{2};
// How often to check liveness, deadline, and abort state. Takes 1 us for 8 ranks, 10 us for 64.
inline constexpr std::chrono::milliseconds kCheckInterval{1};
// How often a waiting thread lets the program handle signals, such as Ctrl-C: a third of the time
// within which a user expects an answer.
inline constexpr std::chrono::milliseconds kSignalInterval{100};

// A futex is the word's lower half.
static_assert(std::endian::native == std::endian::little, "the lower half comes first");
static_assert(std::atomic<uint64_t>::is_always_lock_free);

// Sleeps until the word's sleepers are woken, the word no longer holds `seen`, or the time is over.
// Compares the lower 32 bits: if the word advances by 2^32 while a thread falls asleep, the thread
// sleeps the whole time.
inline void sleep_on(const std::atomic<uint64_t>& word, uint64_t seen,
                     std::chrono::nanoseconds at_most) {
  if (at_most <= at_most.zero()) return;
  constexpr std::chrono::seconds kSecond{1};
  const timespec time = {.tv_sec = at_most / kSecond, .tv_nsec = (at_most % kSecond).count()};
  syscall(SYS_futex, &word, FUTEX_WAIT, static_cast<uint32_t>(seen), &time, nullptr, 0);
}
inline void wake_sleepers(const std::atomic<uint64_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Doorbell in shared memory, on which the threads of a rank sleep until another process has work
// for them; all zeros is the initial state. Ringing costs one load of a line that hardly ever
// changes; the kernel is called only if a thread sleeps.
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
