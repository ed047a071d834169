// How threads that may wait go together with the interpreter: they release the GIL, and they are
// counted.
#pragma once
#include <pybind11/pybind11.h>

#include <atomic>
#include <optional>

namespace pycollect::dist {

// Releases the GIL if this thread holds it. A thread must release it before it waits for another
// thread, which may need the GIL to drop the last reference to a tensor that Python references.
class GilRelease {
 public:
  GilRelease() {
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) released_.emplace();
  }

 private:
  std::optional<pybind11::gil_scoped_release> released_;
};

// Counts the threads inside calls that may wait. When the groups are closed at interpreter exit,
// these threads wake with an error and must take the GIL while it exists: up to Python 3.13, the
// interpreter ends a later thread by unwinding its stack, which terminates the process with
// SIGABRT.
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
