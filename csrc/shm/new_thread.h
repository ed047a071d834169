// A thread of a group's own; or the sentence that there can be none: at a limit of processes, or
// without memory for its stack.
#pragma once
#include <signal.h>

#include <system_error>
#include <thread>

#include "../plan/error.h"

namespace pycollect::shm {

// But for those of errors. Of this thread, and of those that it makes.
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

// Signals are for the threads that were there. Not where a caller's code runs, whose processes
// would begin without them, too.
template <class Body>
std::thread new_thread_without_signals(Body body) {
  const SignalsBlocked blocked;
  return new_thread(std::move(body));
}

}  // namespace pycollect::shm
