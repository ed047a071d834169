// See thread_activity.h. Reads /proc, which takes about 20 us.
#include "thread_activity.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include "../plan/error.h"

namespace pycollect::rank_threads {
namespace {

std::ifstream open_status(pid_t thread, const char* file) {
  return std::ifstream(text("/proc/self/task/", thread, "/", file));
}

// Returns the system call in which the thread is, or -1.
long system_call(pid_t thread) {
  auto file = open_status(thread, "syscall");
  long number = -1;
  return file >> number ? number : -1;
}

// Returns whether the thread is in a futex call without a time limit, its fourth argument.
bool is_in_futex(pid_t thread) {
  auto file = open_status(thread, "syscall");
  std::string number, argument;
  if (!(file >> number) || number != text(SYS_futex)) return false;
  for (int i = 0; i < 4; ++i) file >> argument;
  return argument == "0x0";
}

// Returns the number of times that the thread has gone to sleep.
std::optional<uint64_t> sleeps(pid_t thread) {
  auto file = open_status(thread, "status");
  constexpr std::string_view kName = "voluntary_ctxt_switches:";
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(kName)) return std::stoull(line.substr(kName.size()));
  return {};
}

}  // namespace

pid_t ThreadActivity::this_thread() { return static_cast<pid_t>(syscall(SYS_gettid)); }

bool ThreadActivity::all_others_blocked(const std::vector<pid_t>& threads) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    const pid_t thread = std::stoi(entry.path().filename());
    if (std::find(threads.begin(), threads.end(), thread) != threads.end()) continue;
    const long call = system_call(thread);
    if (call != SYS_futex && call != SYS_read) return false;
  }
  return true;
}

std::chrono::nanoseconds ThreadActivity::blocked_for() {
  const auto now = std::chrono::steady_clock::now();
  const auto switches = sleeps(thread_);
  if (!switches || !is_in_futex(thread_)) {
    switches_ = 0;
    return {};
  }
  if (*switches != switches_) since_ = now;
  switches_ = *switches;
  return now - since_;
}

}  // namespace pycollect::rank_threads
