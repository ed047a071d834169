// Memory shared by several processes: an unnamed file (memfd), which the kernel frees however a job
// ends. The whole address range is reserved and memory is committed in parts, so the mapping never
// moves.
#pragma once
#include <cstddef>
#include <memory>
#include <string>

#include "system.h"

namespace pycollect::ipc {

// The owner of memory that a transfer uses: the memory stays valid as long as a copy of it exists.
using MemoryOwner = std::shared_ptr<const void>;

class Segment {
 public:
  static std::shared_ptr<Segment> create(std::size_t bytes);
  Segment(UniqueFd file, std::size_t bytes);  // maps another process's memory
  ~Segment();

  std::byte* data() const { return data_; }
  int descriptor() const { return file_.get(); }

  // Allocates memory for a range now and maps it, or throws std::runtime_error that says how much
  // is available: a shortage is an error here and not a SIGBUS later.
  void commit(std::size_t offset, std::size_t bytes);
  // Maps a committed range's pages into this process, so that collectives cause no page faults. The
  // range may be in use meanwhile.
  void touch(std::size_t offset, std::size_t bytes) const noexcept;

 private:
  UniqueFd file_;
  std::size_t bytes_;
  std::byte* data_;
};

// How much memory can be committed before the kernel's OOM killer acts.
struct AvailableMemory {
  std::size_t bytes;
  std::string where;  // the tightest limit: "on this machine", "in the control group /a/b"
};

// Returns the memory that the limits of control groups (of a container or a batch job) leave to
// this process, with as much of `swap` (bytes free on the machine) as they may use. `list` and
// `folder` have the formats of /proc/self/cgroup and /sys/fs/cgroup.
AvailableMemory available_in_cgroups(const std::string& list, const std::string& folder,
                                     std::size_t swap);

}  // namespace pycollect::ipc
