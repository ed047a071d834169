#include "life.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>

#include <atomic>
#include <cerrno>
#include <fstream>
#include <map>
#include <mutex>
#include <semaphore>
#include <thread>

#include "../plan/error.h"
#include "system.h"

namespace pycollect::shm {
namespace {

Descriptor open_pidfd(pid_t pid) {
  return Descriptor(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
}

// What /proc calls the process: its numbers can be those of another pid namespace. 0: nothing.
pid_t number_in_proc(const Descriptor& pidfd) {
  std::ifstream said(text("/proc/self/fdinfo/", pidfd.get()));
  pid_t number = 0;
  for (std::string word; said >> word;)
    if (word == "Pid:") said >> number;
  return number;
}

// A process that becomes another program (exec) keeps its number, and its pidfd says nothing of
// it. What was opened of its memory stays that program's: a read of half an entry of the page table
// is refused as long as the memory is there, and then reads nothing. It waits for no lock of the
// other process, as reading anything would that is in its memory.
class AddressSpace {
 public:
  // Watches nothing where /proc is not there, hides that process, or answers otherwise.
  explicit AddressSpace(const Descriptor& pidfd) {
    const pid_t number = number_in_proc(pidfd);
    if (number <= 0) return;
    table_ = Descriptor(open(text("/proc/", number, "/pagemap").c_str(), O_RDONLY | O_CLOEXEC));
    if (look() >= 0 || errno != EINVAL) table_ = Descriptor();
  }
  bool has_ended() const { return table_ && look() == 0; }

 private:
  ssize_t look() const {
    char half = 0;
    return pread(table_.get(), &half, sizeof half, 0);
  }
  Descriptor table_;
};

// A process for as long as it runs one program; never the next one that is given its number.
class Process {
 public:
  explicit Process(Descriptor pidfd) : pidfd_(std::move(pidfd)), space_(pidfd_) {}
  int pidfd() const { return pidfd_.get(); }
  bool is_another_program() const { return space_.has_ended(); }
  bool has_ended() const {
    pollfd polled = {pidfd(), POLLIN, 0};
    return poll(&polled, 1, 0) != 0 || is_another_program();
  }

 private:
  Descriptor pidfd_;
  AddressSpace space_;  // beside it, as a child that vfork makes has the same, and can outlive it
};

// The processes that the groups of this one watch, each opened once for all of them.
class Watched {
 public:
  // A forked child begins with none: a thread of its parent's may have been changing those.
  static Watched& here() {
    static std::atomic<Watched*> latest{nullptr};
    Watched* now = latest.load();
    while (now == nullptr || !now->origin_.is_here()) {
      auto made = std::make_unique<Watched>();
      if (latest.compare_exchange_strong(now, made.get())) now = made.release();
    }
    return *now;
  }

  // Nothing where there is no such process.
  std::shared_ptr<const Process> find(pid_t pid, Rank rank) {
    const std::lock_guard lock(mutex_);
    std::erase_if(known_, [](const auto& known) { return known.second.expired(); });
    if (const auto known = known_[pid].lock(); known && !known->has_ended()) return known;
    Descriptor pidfd = open_pidfd(pid);
    if (!pidfd && errno == ESRCH) return nullptr;
    if (!pidfd) refuse(text("cannot watch rank ", rank, " (pid ", pid, ")"), errno);
    const auto opened = std::make_shared<const Process>(std::move(pidfd));
    known_[pid] = opened;
    return opened;
  }

 private:
  const Origin origin_;
  std::mutex mutex_;
  std::map<pid_t, std::weak_ptr<const Process>> known_;  // a number may belong to a new one by now
};

class ByPidfd final : public Peers {
 public:
  ByPidfd(const std::vector<pid_t>& pids, Rank me) : peers_(pids.size()) {
    for (Rank r = 0; r < static_cast<Rank>(pids.size()); ++r) {
      if (r == me) continue;
      peers_[r] = Watched::here().find(pids[r], r);
      if (!peers_[r]) gone_ |= uint64_t{1} << r;
    }
  }

  uint64_t dead() override {
    std::array<pollfd, kMostRanks> polled;
    for (std::size_t r = 0; r < peers_.size(); ++r)
      polled[r] = {peers_[r] ? peers_[r]->pidfd() : -1, POLLIN, 0};  // -1: poll passes over it
    uint64_t dead = gone_;
    const bool any = poll(polled.data(), peers_.size(), 0) > 0;
    for (std::size_t r = 0; r < peers_.size(); ++r)
      if (peers_[r] && ((any && polled[r].revents != 0) || peers_[r]->is_another_program()))
        dead |= uint64_t{1} << r;
    return dead;
  }

 private:
  std::vector<std::shared_ptr<const Process>> peers_;  // [rank]; none of its own
  uint64_t gone_ = 0;                                  // from the beginning
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
