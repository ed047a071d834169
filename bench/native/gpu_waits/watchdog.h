// The watchdog in the parent process: ends all ranks in time, and collects their exit statuses.
#pragma once
#include <sys/wait.h>

#include <csignal>
#include <map>

#include "page.h"

namespace gpu_waits {

inline constexpr int kNoDevice = 77;   // exit status without a GPU: a skipped test in automake
inline constexpr double kGrace = 2.0;  // seconds until released processes are killed

class Watchdog {
 public:
  Watchdog(Page& page, std::vector<pid_t> ranks) : page_(page), ranks_(std::move(ranks)) {}

  // Waits for the ranks. Returns true if all ended by themselves within `seconds`. Otherwise
  // releases their streams, and kills the ranks that do not end then.
  bool watch(double seconds) {
    if (collect(now() + seconds)) return true;
    for (int r = 0; r < static_cast<int>(ranks_.size()); ++r)
      stages_.push_back(page_.ranks[r].stage.value.load());
    page_.stop.value.store(1);
    for (RankState& rank : page_.ranks) rank.counter.value.store(kReleased);
    released_ = collect(now() + kGrace);
    for (pid_t pid : ranks_)
      if (!ended_.contains(pid)) kill(pid, SIGKILL);
    collect(now() + 60);
    return false;
  }

  // Returns the largest exit status of the ranks, but kNoDevice if any rank ended with it.
  int exit_status() const {
    int largest = 0;
    for (const auto& [pid, status] : ended_) {
      const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      if (code == kNoDevice) return code;
      largest = std::max(largest, code);
    }
    return largest;
  }
  bool released() const { return released_; }
  const std::vector<Word>& stages() const { return stages_; }

 private:
  bool collect(double deadline) {
    while (ended_.size() < ranks_.size()) {
      int status = 0;
      const pid_t pid = waitpid(-1, &status, WNOHANG);
      if (pid > 0) ended_[pid] = status;
      if (pid > 0) continue;
      if (now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  Page& page_;
  const std::vector<pid_t> ranks_;
  std::map<pid_t, int> ended_;
  std::vector<Word> stages_;
  bool released_ = true;
};

}  // namespace gpu_waits
