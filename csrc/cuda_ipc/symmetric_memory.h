// Symmetric GPU memory: segments on a rank's GPUs, apart from its staging buffer, that peers can
// map. A rank adds segments over time, outside of collectives. The owner publishes an export entry
// in the shared memory. A peer opens the segment once, when it needs it, and records that in the
// entry, so that no segment is freed while a peer has it open. Allocators divide segments into
// tensors.
#pragma once
#include <compare>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "../group/group.h"
#include "signal_pad.h"

namespace pycollect::cuda_ipc {

// Registered offset of a byte in a rank's symmetric GPU memory, valid on every rank: the segment's
// number, then the offset in the segment.
using RemoteOffset = uint64_t;

// All symmetric segments of one rank in one group, on any devices. Thread-safe. Exists before the
// GPU rendezvous, and stays as long as any of its memory is in use.
class SymmetricMemory {
 public:
  SymmetricMemory(std::shared_ptr<CudaIpcMemory> gpu, const ipc::Group& group);
  // Call after `close`. Segments that are still in use stay until the process ends.
  ~SymmetricMemory() = default;
  SymmetricMemory(const SymmetricMemory&) = delete;
  SymmetricMemory& operator=(const SymmetricMemory&) = delete;

  // Returns a segment of at least `bytes`, shared with no other allocation. If it cannot be
  // exported or no export entry is free, it has no registered offsets. Throws std::runtime_error if
  // there is no memory, and after `close`.
  std::byte* add(Device device, std::size_t bytes);
  // Returns why segments could not be exported since the last call, as sentences: `add` may run in
  // an allocator that holds a lock, so it reports nothing itself.
  std::vector<std::string> unreachable();
  // Takes back a segment from `add` when the device is done with it. The segment is freed if no
  // peer has it open, and otherwise reused. Allowed after `close`, too.
  void give_back(std::byte* memory) noexcept;

  // Returns the registered offset of these bytes of this rank, if one exported segment contains all
  // of them.
  std::optional<RemoteOffset> offset_of(const std::byte* at, std::size_t bytes) const;
  // Returns the address of a peer's registered offset on a device of this process, and opens the
  // segment on first use. Throws std::runtime_error with CUDA's reason if that fails.
  std::byte* at(Device device, Rank owner, RemoteOffset offset);

  // Leaves the peers' memory mapped until the process ends, because a device of this process may
  // still access it. Call before close().
  void abandon_peer_segments();
  // Shuts down, when no device of this process accesses the peers' memory any more: unmaps that
  // memory, and frees segments that contain no tensors.
  void close();

  struct SymmetricUsage {
    std::size_t used, cached;  // bytes in use; bytes that are free but kept
  };
  SymmetricUsage usage() const;

 private:
  struct OwnSegment {
    Device device;
    std::size_t bytes;
    int number;   // of its export entry; kNone: it has none
    bool in_use;  // by the caller of `add`
  };
  struct MappedSegment {
    Device device;
    Rank owner;
    int number;
    auto operator<=>(const MappedSegment&) const = default;
  };
  static constexpr int kNone = -1;

  std::byte* reuse(Device device, std::size_t bytes);
  int publish(Device device, std::byte* memory, std::size_t bytes);
  bool unpublish(int number);
  std::byte* open(Device device, Rank owner, int number);
  void close_peer_segments();
  std::shared_ptr<ipc::Segment> segment() const;
  void free(Device device, std::byte* memory) const noexcept;

  const std::shared_ptr<CudaIpcMemory> gpu_;
  const ipc::ForkGuard fork_guard_;
  const SignalPad signal_pad_;
  const Rank rank_;
  const int world_;

  mutable std::mutex mutex_;  // for the next five members; never held during a GPU call
  // The shared memory that contains the export entries; null after the group has ended.
  std::shared_ptr<ipc::Segment> segment_;
  std::map<std::byte*, OwnSegment> own_;
  uint64_t used_entries_ = 0;  // a bit for each export entry in use
  std::vector<std::string> unreachable_;
  bool closed_ = false;

  std::mutex open_mutex_;  // for the next two members
  std::map<MappedSegment, std::byte*> opened_;
  bool closed_to_peers_ = false;
};

}  // namespace pycollect::cuda_ipc
