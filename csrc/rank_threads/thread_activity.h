// Tells from outside for how long a thread has been in a wait for another thread: a futex.
// That is how locks, condition variables and joins wait.
#pragma once
#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace pycollect::rank_threads {

class ThreadActivity {
 public:
  static pid_t this_thread();
  static std::vector<pid_t> all_threads();  // of the process
  // The system call in which a thread sleeps, and its first argument, such as the file that it
  // reads.
  using Sleep = std::pair<long, std::string>;
  static std::optional<Sleep> sleep_of(pid_t thread);  // nothing: it runs
  static bool is_lock(const Sleep& sleep);

  void attach_to(pid_t thread) { thread_ = thread; }
  pid_t thread() const { return thread_; }
  // Returns how long calls have seen the thread in its present wait; 0 if it is in none, or if the
  // wait has a time limit of its own and `limited` is false.
  std::chrono::nanoseconds blocked_for(bool limited = false);

 private:
  pid_t thread_ = 0;
  uint64_t switches_ = 0;
  std::chrono::steady_clock::time_point since_ = {};
};

}  // namespace pycollect::rank_threads
