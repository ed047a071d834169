// Tells from outside for how long a thread has been in a wait that only another thread can end: a
// futex without a time limit. That is how locks, condition variables and joins wait.
#pragma once
#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <vector>

namespace pycollect::rank_threads {

class ThreadActivity {
 public:
  static pid_t this_thread();
  // Returns whether all threads of the process but these wait for another thread, with or without a
  // time limit, or for input.
  static bool all_others_blocked(const std::vector<pid_t>& threads);

  void attach_to_this_thread() { thread_ = this_thread(); }
  pid_t thread() const { return thread_; }
  // Returns how long calls have seen the thread in its present wait; 0 if it is in none.
  std::chrono::nanoseconds blocked_for();

 private:
  pid_t thread_ = 0;
  uint64_t switches_ = 0;
  std::chrono::steady_clock::time_point since_ = {};
};

}  // namespace pycollect::rank_threads
