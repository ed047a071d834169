// See thread_activity.h. Reads /proc, which takes about 20 us.
#include "thread_activity.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "../plan/error.h"

namespace pycollect::rank_threads {
namespace {

std::ifstream open_status(pid_t thread, const char* file) {
  return std::ifstream(text("/proc/self/task/", thread, "/", file));
}

enum class FutexWait { none, limited, unlimited };

// Returns whether only threads of this process can end a futex call with these arguments: its word
// is private to the process, or it holds the number of a thread that is joined.
bool is_for_thread(const std::string& operation, const std::string& value) {
  if ((std::stoul(operation, nullptr, 16) & FUTEX_PRIVATE_FLAG) != 0) return true;
  return std::filesystem::exists(text("/proc/self/task/", std::stoul(value, nullptr, 16)));
}

// The time limit of a futex call is its fourth argument.
FutexWait futex_wait(pid_t thread) {
  auto file = open_status(thread, "syscall");
  std::string number, address, operation, value, limit;
  if (!(file >> number >> address >> operation >> value >> limit)) return FutexWait::none;
  if (number != text(SYS_futex)) return FutexWait::none;
  if (!is_for_thread(operation, value)) return FutexWait::none;
  return limit == "0x0" ? FutexWait::unlimited : FutexWait::limited;
}

// Returns the number of times that the thread has gone to sleep.
std::optional<uint64_t> times_slept(pid_t thread) {
  auto file = open_status(thread, "status");
  constexpr std::string_view kName = "voluntary_ctxt_switches:";
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(kName)) return std::stoull(line.substr(kName.size()));
  return {};
}

}  // namespace

pid_t ThreadActivity::this_thread() { return static_cast<pid_t>(syscall(SYS_gettid)); }

std::vector<pid_t> ThreadActivity::all_threads() {
  std::vector<pid_t> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task"))
    found.push_back(std::stoi(entry.path().filename()));
  return found;
}

std::optional<ThreadActivity::Sleep> ThreadActivity::sleep_of(pid_t thread) {
  auto file = open_status(thread, "syscall");
  Sleep found;
  if (file >> found.first >> found.second) return found;
  return {};
}

bool ThreadActivity::is_lock(const Sleep& sleep) { return sleep.first == SYS_futex; }

std::chrono::nanoseconds ThreadActivity::blocked_for(bool limited) {
  const auto now = std::chrono::steady_clock::now();
  const auto switches = times_slept(thread_);
  const FutexWait wait = futex_wait(thread_);
  if (!switches || wait == FutexWait::none) {
    switches_ = 0;
    return {};
  }
  if (*switches != switches_) since_ = now;
  switches_ = *switches;
  return wait == FutexWait::unlimited || limited ? now - since_ : std::chrono::nanoseconds();
}

}  // namespace pycollect::rank_threads
