// What a process of a group needs from the kernel and the C library: descriptors that close
// themselves, threads, random numbers, the detection of forks, and errors that say what failed.
#pragma once
#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "../plan/error.h"

namespace pycollect::ipc {

class UniqueFd {
 public:
  explicit UniqueFd(int fd = -1) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~UniqueFd() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

// Throws std::system_error with the message "`what`: " and the text of the errno value `error`.
[[noreturn]] void refuse(const std::string& what, int error);
uint64_t random_number();  // never 0

// Detects that this process was forked after an object was created, however that was done. A forked
// child has copies of its parent's locks but none of its threads, so it must not use either.
//
// Reads a byte that the kernel clears in forked children, which takes 1 ns. getpid() takes 150 ns,
// nearly as long as a small all_reduce.
class ForkGuard {
 public:
  ForkGuard();
  // Returns true in a child of the process that constructed the object.
  bool forked() const { return alive_ != nullptr ? *alive_ == 0 : getpid() != pid_; }
  void require_not_forked(const char* operation) const;  // throws CollectiveError

 private:
  // A pointer: the library may be loaded twice (as pycollect._testing), and one copy constructs
  // objects that the other one uses.
  const unsigned char* alive_;  // null: no such page; then process ids are compared
  pid_t pid_;
};

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

// Starts a background thread of a group. If the process limit is reached or memory for the stack is
// missing, throws an error that names the remedy.
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
