// Counts the threads inside calls that may wait. When the groups are closed at interpreter exit,
// these threads wake with an error and must take the GIL while it exists: up to Python 3.13, the
// interpreter ends a later thread by unwinding its stack, which terminates the process with
// SIGABRT.
#pragma once
#include <atomic>

namespace pycollect::dist {

class InFlightGuard {
 public:
  InFlightGuard() { ++count_; }
  ~InFlightGuard() { --count_; }
  InFlightGuard(const InFlightGuard&) = delete;
  InFlightGuard& operator=(const InFlightGuard&) = delete;

  static bool any() { return count_ != 0; }

 private:
  static inline std::atomic<int> count_{0};
};

}  // namespace pycollect::dist
