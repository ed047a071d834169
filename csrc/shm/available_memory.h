// Available memory: how much can be committed before the kernel's OOM killer acts. The lesser of
// what the machine has and what the limits of this process's control groups leave (of a container,
// of a batch job).
#pragma once
#include <cstddef>
#include <string>

namespace pycollect::shm {

struct AvailableMemory {
  std::size_t bytes;
  std::string where;  // the tightest limit: "on this machine", "in the control group /a/b"
};

AvailableMemory available();

// Returns what the limits of the control groups alone leave. `list` and `folder` have the formats
// of /proc/self/cgroup and /sys/fs/cgroup; `swap` is the machine's free swap in bytes.
AvailableMemory available_in_cgroups(const std::string& list, const std::string& folder,
                                     std::size_t swap);

}  // namespace pycollect::shm
