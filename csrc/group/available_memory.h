// Available memory: how much can be committed before the kernel's OOM killer acts. It is the lesser
// of the machine's free memory and the rest of the limits of this process's control groups (of a
// container or a batch job).
#pragma once
#include <cstddef>
#include <string>

namespace pycollect::ipc {

struct AvailableMemory {
  std::size_t bytes;
  std::string where;  // the tightest limit: "on this machine", "in the control group /a/b"
};

AvailableMemory available();

// Returns the memory that the limits of the control groups alone make available. `list` and
// `folder` have the formats of /proc/self/cgroup and /sys/fs/cgroup; `swap` is the free swap in
// bytes.
AvailableMemory available_in_cgroups(const std::string& list, const std::string& folder,
                                     std::size_t swap);

}  // namespace pycollect::ipc
