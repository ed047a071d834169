// Starts a background thread of a group, or throws an error that says what to do: at a process
// limit, or without memory for the thread's stack.
#pragma once
#include <signal.h>

#include <system_error>
#include <thread>

#include "../plan/error.h"

namespace pycollect::shm {

// Blocks all signals except those of errors, in this thread and in threads that it creates.
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

// Starts a thread that handles no signals, which stay with the application's threads. Not for
// threads that run a caller's code: processes started there would have the signals blocked, too.
template <class Body>
std::thread new_thread_without_signals(Body body) {
  const SignalsBlocked blocked;
  return new_thread(std::move(body));
}

}  // namespace pycollect::shm
