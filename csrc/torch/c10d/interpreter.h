// How threads of groups that may wait go together with Python's interpreter: they release the GIL,
// they are counted, and they run the handlers of signals, such as Ctrl-C. Python runs its handlers
// on its main thread only, when that thread asks for them.
#pragma once
#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <optional>

#include "../../group/wait.h"

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

// Within its scope, this thread's waits do not run signal handlers, because they must not throw.
class SignalsDeferred {
 public:
  SignalsDeferred() { ++depth_; }
  ~SignalsDeferred() { --depth_; }
  SignalsDeferred(const SignalsDeferred&) = delete;
  SignalsDeferred& operator=(const SignalsDeferred&) = delete;
  static bool any() { return depth_ != 0; }

 private:
  static inline thread_local int depth_ = 0;
};

// Returns whether this thread is the one that runs Python's signal handlers.
inline bool handles_signals() {
  thread_local const bool is_main = syscall(SYS_gettid) == getpid();
  return is_main && !SignalsDeferred::any() && Py_IsInitialized() != 0;
}

// What a signal handler has raised, such as KeyboardInterrupt.
struct SignalRaised final : pybind11::error_already_set, ipc::Interruption {};

// Runs the handlers of signals that have arrived. Throws SignalRaised.
inline void check_signals() {
  if (!handles_signals()) return;
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw SignalRaised();
}

// Rethrows what a signal handler has raised in code of Python that this thread called, such as a
// store's. Call where `error` is caught.
inline void rethrow_interrupt(const std::exception& error) {
  const auto* const raised = dynamic_cast<const pybind11::error_already_set*>(&error);
  if (raised == nullptr) return;
  const pybind11::gil_scoped_acquire gil;
  if (!raised->matches(PyExc_Exception)) throw;
}

}  // namespace pycollect::dist
