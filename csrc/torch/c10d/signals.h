// Signals that the user's program handles, such as Ctrl-C, in the waits of groups. Python runs its
// handlers on its main thread only, when that thread asks for them.
#pragma once
#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../../group/wait.h"

namespace pycollect::dist {

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

}  // namespace pycollect::dist
