// See headroom.h. A limit counts pages of files, too, which the kernel drops when it is reached,
// and what it writes to swap no more: both are room. Files that are not there limit nothing.
#include "headroom.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <string_view>

#include "../plan/error.h"

namespace pycollect::shm {
namespace {

using Path = std::filesystem::path;
constexpr Headroom kUnlimited{SIZE_MAX, {}};

std::size_t sum(std::size_t a, std::size_t b) { return a > SIZE_MAX - b ? SIZE_MAX : a + b; }
std::size_t rest(std::size_t limit, std::size_t used) { return limit > used ? limit - used : 0; }

// What stands behind these words in a file of lines; nothing where there is none of them.
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

// "max" is no number.
std::optional<std::size_t> number(const Path& path) {
  std::ifstream file(path);
  std::size_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

struct Names {  // of a group's files
  const char *limit, *used, *inactive, *active;
};
constexpr Names kOne{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
                     "total_active_file"};
constexpr Names kTwo{"memory.max", "memory.current", "inactive_file", "active_file"};

// What of `swap` the group may have, in the second version; the first has a limit of both together.
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

// A group's and those that it is in. What a container sees as the root may be listed with a name
// that only its host knows: such folders are not there, and the root is.
Headroom least(const Path& root, const std::string& group, const Names& names, std::size_t swap) {
  Headroom found = kUnlimited;
  for (Path inner = Path(group).relative_path();; inner = inner.parent_path()) {
    const std::size_t room = room_in(root / inner, names, swap);
    if (room < found.bytes) found = {room, text("in the control group /", inner.string())};
    if (inner.empty()) return found;
  }
}

}  // namespace

Headroom headroom_in_groups(const std::string& list, const std::string& folder, std::size_t swap) {
  Headroom found = kUnlimited;
  const auto take = [&](const Headroom& other) {
    if (other.bytes < found.bytes) found = other;
  };
  std::ifstream file(list);
  // number:controllers:/group; no controllers are named in the second version
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == line.npos || second == line.npos) continue;
    const std::string controllers = text(",", line.substr(first + 1, second - first - 1), ",");
    const std::string group = line.substr(second + 1);
    if (controllers.find(",memory,") != controllers.npos)
      take(least(Path(folder) / "memory", group, kOne, swap));
    if (controllers == ",,")
      for (const char* where : {"", "unified"})
        take(least(Path(folder) / where, group, kTwo, swap));
  }
  return found;
}

Headroom headroom() {
  constexpr std::size_t kKiB = 1 << 10;
  const auto swap = total("/proc/meminfo", {"SwapFree:"}).value_or(0) * kKiB;
  const auto memory = total("/proc/meminfo", {"MemAvailable:"});
  const Headroom groups = headroom_in_groups("/proc/self/cgroup", "/sys/fs/cgroup", swap);
  const std::size_t machine = memory ? sum(*memory * kKiB, swap) : SIZE_MAX;
  return machine <= groups.bytes ? Headroom{machine, "on this machine"} : groups;
}

}  // namespace pycollect::shm
