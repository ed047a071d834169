// Allocator of a rank's symmetric heap, where peers read and write tensors in place (zero-copy). It
// commits more memory than requested and keeps free memory, because fresh pages cost more than a
// collective does. It keeps the segment mapped after the group is destroyed.
//
// After a failed call, peers that were in the middle of it may still access exposed tensors for a
// while. So the heap of an aborted group neither frees nor allocates memory.
#pragma once
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "../plan/plan.h"
#include "failures.h"
#include "segment.h"
#include "system.h"

namespace pycollect::ipc {

class Group;

class SymmetricHeap {
 public:
  // Returns the bytes of address space to reserve for each rank: enough for any tensor that fits
  // into the machine's memory, within the limits of address space. The same on all ranks of a host.
  static std::size_t default_bytes(int world);
  static constexpr std::size_t kAlignment = 256;  // bytes, as cudaMalloc aligns

  explicit SymmetricHeap(const Group& group);

  // Returns an offset from the beginning of the rank's heap, also for 0 bytes. Throws
  // std::runtime_error when memory runs out or in a forked child, and the abort cause (PeerLost or
  // Timeout) when the group is aborted.
  std::size_t allocate(std::size_t bytes);
  // Does nothing in a forked child, whose parent owns the memory, or when the group is aborted.
  void free(std::size_t offset) noexcept;
  std::byte* data() const { return segment_->data() + begin_; }

  struct HeapUsage {
    // Bytes of allocated blocks, of free but committed memory, and of reserved address space.
    std::size_t used, cached, reserved;
  };
  HeapUsage usage() const;

 private:
  static constexpr std::size_t kGranule = 1 << 20;  // memory is committed in multiples of this size

  // A block, or a gap between blocks.
  struct Area {
    std::size_t bytes;
    bool is_free;
  };

  void add_gap(std::size_t offset, std::size_t bytes);
  void commit(std::size_t end);

  const ForkGuard fork_guard_;
  const std::shared_ptr<Segment> segment_;
  const AbortState abort_state_;
  const std::size_t begin_, bytes_;  // offset in the segment and size of this rank's heap
  mutable std::mutex mutex_;
  std::map<std::size_t, Area> areas_;                      // by offset: blocks and gaps
  std::set<std::pair<std::size_t, std::size_t>> by_size_;  // (bytes, offset) of the gaps
  std::size_t used_ = 0;                                   // bytes of blocks
  std::size_t committed_ = 0;  // bytes from the beginning of the heap, in which all blocks lie
  uint64_t calls_ = 0;         // number of calls of `allocate`
};

}  // namespace pycollect::ipc
