// How much memory can be had before the kernel kills somebody for it: what the machine has, and
// what the limits of the control groups leave that this process is in (a container's, a batch
// job's).
#pragma once
#include <cstddef>
#include <string>

namespace pycollect::shm {

struct Headroom {
  std::size_t bytes;
  std::string where;  // whose the least is: "on this machine", "in the control group /a/b"
};

Headroom headroom();

// The same of groups that are listed and laid out as the kernel has them in /proc/self/cgroup and
// /sys/fs/cgroup; `swap` is the machine's.
Headroom headroom_in_groups(const std::string& list, const std::string& folder, std::size_t swap);

}  // namespace pycollect::shm
