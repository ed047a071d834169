// A thread of a group's own, which takes no signals (they are for the threads that were there); or
// the sentence that there can be none: at a limit of processes, or without memory for its stack.
#pragma once
#include <signal.h>

#include <system_error>
#include <thread>

#include "../plan/error.h"

namespace pycollect::shm {

// Of this thread, and of those that it makes.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

template <class Body>
std::thread new_thread(Body body) {
  const SignalsBlocked blocked;
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    throw CollectiveError(text("this process cannot make another thread (", error.code().message(),
                               "); allow it more threads (ulimit -u, the cgroup's pids.max) or ",
                               "more memory"));
  }
}

}  // namespace pycollect::shm
