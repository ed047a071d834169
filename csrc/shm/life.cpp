#include "life.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>

#include <atomic>
#include <cerrno>
#include <semaphore>
#include <thread>

#include "../plan/error.h"
#include "system.h"

namespace pycollect::shm {
namespace {

Descriptor open_pidfd(pid_t pid) {
  return Descriptor(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
}

class ByPidfd final : public Peers {
 public:
  ByPidfd(const std::vector<pid_t>& pids, Rank me) {
    open_.reserve(pids.size());
    for (Rank r = 0; r < static_cast<Rank>(pids.size()); ++r) {
      open_.push_back(r == me ? Descriptor() : open_pidfd(pids[r]));
      if (r == me || open_.back()) continue;
      if (errno != ESRCH) refuse(text("cannot watch rank ", r, " (pid ", pids[r], ")"), errno);
      gone_ |= uint64_t{1} << r;
    }
  }

  uint64_t dead() override {
    std::array<pollfd, kMostRanks> polled;
    for (std::size_t r = 0; r < open_.size(); ++r) polled[r] = {open_[r].get(), POLLIN, 0};
    uint64_t dead = gone_;
    if (poll(polled.data(), open_.size(), 0) > 0)
      for (std::size_t r = 0; r < open_.size(); ++r)
        if (polled[r].revents != 0) dead |= uint64_t{1} << r;
    return dead;
  }

 private:
  std::vector<Descriptor> open_;  // [rank]; none of its own, which poll passes over
  uint64_t gone_ = 0;             // from the beginning
};

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

// A thread that holds a lock and does nothing else.
class Holder {
 public:
  explicit Holder(pthread_mutex_t& lock) : lock_(lock) {
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
    const int failed = pthread_mutex_init(&lock, &kind);
    pthread_mutexattr_destroy(&kind);
    if (failed != 0) refuse("cannot make a lock in shared memory", failed);
    {
      const SignalsBlocked blocked;  // they are for the threads that were there
      thread_ = std::make_unique<std::thread>([this] { hold(); });
    }
    held_.acquire();
  }
  ~Holder() {
    if (!origin_.is_here()) {
      thread_.release();  // it stayed with the parent, and there is nothing here to join
      return;
    }
    end_.release();
    thread_->join();
  }

 private:
  void hold() {
    pthread_mutex_lock(&lock_);
    held_.release();
    end_.acquire();
    pthread_mutex_unlock(&lock_);
  }

  pthread_mutex_t& lock_;
  Origin origin_;
  std::binary_semaphore held_{0}, end_{0};
  std::unique_ptr<std::thread> thread_;
};

class ByLock final : public Peers {
 public:
  ByLock(Control& control, int world, Rank me)
      : control_(control), world_(world), me_(me), holder_(control.lives[me].held) {}

  uint64_t dead() override {
    uint64_t dead = dead_.load(std::memory_order_relaxed);
    for (Rank r = 0; r < world_; ++r)
      if (r != me_ && (dead >> r & 1) == 0 && !held(control_.lives[r].held))
        dead |= uint64_t{1} << r;
    dead_.fetch_or(dead, std::memory_order_relaxed);
    return dead;
  }

 private:
  // Who finds the lock of a dead one lets it go as it is, which makes it of no use to the next.
  static bool held(pthread_mutex_t& lock) {
    const int state = pthread_mutex_trylock(&lock);
    if (state == EBUSY) return true;
    if (state == 0 || state == EOWNERDEAD) pthread_mutex_unlock(&lock);
    return state == 0;  // let go of by its owner: it has left, and says so itself
  }

  Control& control_;
  int world_;
  Rank me_;
  std::atomic<uint64_t> dead_{0};
  Holder holder_;
};

}  // namespace

bool can_open_pidfd() { return static_cast<bool>(open_pidfd(getpid())); }

std::unique_ptr<Peers> watch_by_pidfd(const std::vector<pid_t>& pids, Rank me) {
  return std::make_unique<ByPidfd>(pids, me);
}

std::unique_ptr<Peers> watch_by_lock(Control& control, int world, Rank me) {
  return std::make_unique<ByLock>(control, world, me);
}

}  // namespace pycollect::shm
