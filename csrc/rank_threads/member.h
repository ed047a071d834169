// A thread of a launch as the scheduler sees it: the main thread of a rank, or a helper.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <vector>

#include "scheduler.h"

namespace pycollect::rank_threads {

enum class MemberState {
  absent,  // has not entered
  queued,  // wants a turn, and waits for nothing else
  running,
  waiting,
  outside,  // has lost its turn in a wait that the scheduler does not know
  ended
};

struct Member {
  Rank rank;
  const bool is_main;
  std::atomic<MemberState> state{MemberState::absent};  // changed with the scheduler locked
  bool sleeps = false;                                  // in `granted`
  const ReadyCondition* condition = nullptr;            // of a waiting member
  bool gives_way = false;                               // it continues if no other member can
  bool expired = false;                                 // the condition's deadline is over
  bool released = false;  // granted because no other member can continue
  std::condition_variable granted = {};
  std::vector<std::function<void()>> tasks = {};  // run at the beginning of the next turn
  std::atomic<bool> at_work{false};
  ThreadActivity activity = {};

  bool waits() const { return state == MemberState::waiting; }
};

// Runs a callback. Its errors are its future's: torch keeps them there.
void run_task(const std::function<void()>& task);

// Calls `f` without the lock.
template <class F>
void unlocked(std::unique_lock<std::mutex>& lock, F&& f) {
  struct Relock {
    std::unique_lock<std::mutex>& lock;
    ~Relock() { lock.lock(); }
  };
  lock.unlock();
  const Relock relock{lock};
  f();
}

}  // namespace pycollect::rank_threads
