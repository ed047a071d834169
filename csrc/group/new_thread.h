// Starts a background thread of a group. If the process limit is reached or memory for the stack is
// missing, throws an error that names the remedy.
#pragma once
#include <signal.h>

#include <system_error>
#include <thread>

#include "../plan/error.h"

namespace pycollect::ipc {

// Blocks all signals, except those that report faults, in this thread and in threads it creates.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t signals;
    sigfillset(&signals);
    for (const int error : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS})
      sigdelset(&signals, error);
    pthread_sigmask(SIG_BLOCK, &signals, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

template <class Body>
std::thread new_thread(Body body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    throw CollectiveError(text("this process cannot make another thread (", error.code().message(),
                               "); allow it more threads (ulimit -u, the cgroup's pids.max) or ",
                               "more memory"));
  }
}

// Starts a thread that handles no signals; the application's threads handle them. Not for threads
// that run a caller's code: processes started there would inherit the blocked signals.
template <class Body>
std::thread new_thread_without_signals(Body body) {
  const SignalsBlocked blocked;
  return new_thread(std::move(body));
}

}  // namespace pycollect::ipc
