// See available_memory.h. A control group's limit counts file pages, which the kernel drops when
// the limit is reached, and does not count swapped pages. So both file pages and free swap are
// available memory. A missing file imposes no limit.
#include "available_memory.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <string_view>

#include "../plan/error.h"

namespace pycollect::ipc {
namespace {

using Path = std::filesystem::path;
constexpr AvailableMemory kUnlimited{SIZE_MAX, {}};

std::size_t sum(std::size_t a, std::size_t b) { return a > SIZE_MAX - b ? SIZE_MAX : a + b; }
std::size_t rest(std::size_t limit, std::size_t used) { return limit > used ? limit - used : 0; }

// Returns the sum of the values of lines "word value" whose word is in `words`; nullopt if none.
std::optional<std::size_t> total(const Path& path, std::initializer_list<std::string_view> words) {
  std::ifstream file(path);
  std::optional<std::size_t> all;
  for (std::string line; std::getline(file, line);) {
    std::istringstream parts(line);
    std::string word;
    std::size_t value = 0;
    if (parts >> word >> value && std::find(words.begin(), words.end(), word) != words.end())
      all = sum(all.value_or(0), value);
  }
  return all;
}

// Returns the number in a file; nullopt if the file is missing or contains "max".
std::optional<std::size_t> number(const Path& path) {
  std::ifstream file(path);
  std::size_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

struct Names {  // file names (or keys of memory.stat) of one cgroup version
  const char *limit, *used, *inactive, *active;
};
constexpr Names kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
                          "total_active_file"};
constexpr Names kVersion2{"memory.max", "memory.current", "inactive_file", "active_file"};

// Returns how much of `swap` a version 2 group may use. Version 1 limits memory and swap together.
std::size_t swap_of(const Path& group, std::size_t swap) {
  const auto limit = number(group / "memory.swap.max");
  return limit ? std::min(swap, rest(*limit, number(group / "memory.swap.current").value_or(0)))
               : swap;
}

std::size_t room_in(const Path& group, const Names& names, std::size_t swap) {
  const auto limit = number(group / names.limit);
  if (!limit) return SIZE_MAX;
  const std::size_t files =
      total(group / "memory.stat", {names.inactive, names.active}).value_or(0);
  const std::size_t used = number(group / names.used).value_or(0);
  std::size_t room = sum(sum(rest(*limit, used), files), swap_of(group, swap));
  if (const auto both = number(group / "memory.memsw.limit_in_bytes")) {
    const std::size_t taken = number(group / "memory.memsw.usage_in_bytes").value_or(0);
    room = std::min(room, sum(rest(*both, taken), files));
  }
  return room;
}

// Returns the tightest limit of a group and its ancestors. A container's root group may be listed
// with its name on the host: such folders do not exist in the container, but the root does.
AvailableMemory least(const Path& root, const std::string& group, const Names& names,
                      std::size_t swap) {
  AvailableMemory found = kUnlimited;
  for (Path inner = Path(group).relative_path();; inner = inner.parent_path()) {
    const std::size_t room = room_in(root / inner, names, swap);
    if (room < found.bytes) found = {room, text("in the control group /", inner.string())};
    if (inner.empty()) return found;
  }
}

}  // namespace

AvailableMemory available_in_cgroups(const std::string& list, const std::string& folder,
                                     std::size_t swap) {
  AvailableMemory found = kUnlimited;
  const auto take = [&](const AvailableMemory& other) {
    if (other.bytes < found.bytes) found = other;
  };
  std::ifstream file(list);
  // Line format: number:controllers:/group. Version 2 names no controllers.
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == line.npos || second == line.npos) continue;
    const std::string controllers = text(",", line.substr(first + 1, second - first - 1), ",");
    const std::string group = line.substr(second + 1);
    if (controllers.find(",memory,") != controllers.npos)
      take(least(Path(folder) / "memory", group, kVersion1, swap));
    if (controllers == ",,")
      for (const char* where : {"", "unified"})
        take(least(Path(folder) / where, group, kVersion2, swap));
  }
  return found;
}

AvailableMemory available() {
  constexpr std::size_t kKiB = 1 << 10;
  const auto swap = total("/proc/meminfo", {"SwapFree:"}).value_or(0) * kKiB;
  const auto memory = total("/proc/meminfo", {"MemAvailable:"});
  const AvailableMemory groups = available_in_cgroups("/proc/self/cgroup", "/sys/fs/cgroup", swap);
  const std::size_t machine = memory ? sum(*memory * kKiB, swap) : SIZE_MAX;
  return machine <= groups.bytes ? AvailableMemory{machine, "on this machine"} : groups;
}

}  // namespace pycollect::ipc
