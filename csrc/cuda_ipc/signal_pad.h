// Signal pad of a group's GPUs, in the shared memory that the ranks' streams read and write, too.
// Every word has one writer, except a counter whose stream will not reach the awaited value: a rank
// that gives up waiting advances it. All zeros is the initial state.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "../group/segment_layout.h"
#include "cuda_ipc_memory.h"

namespace pycollect::cuda_ipc {

// Signal pad entry: the counters of a rank's stream, written by the stream. They have cache lines
// of their own, which only streams and threads that poll them access.
struct alignas(128) Counter {
  std::atomic<uint64_t> reached{0};            // progress, with values as of RankState::progress
  alignas(64) std::atomic<uint64_t> ended{0};  // number of the last call whose work has ended
};
static_assert(sizeof(Counter) == 128);

// A rank's result of one step of the GPU rendezvous (see rendezvous.h).
struct RendezvousStepResult {
  bool succeeded = false;
  std::array<char, 239> why = {};
};

// Peer entry of the signal pad: published by one rank for its peers.
struct alignas(128) PeerEntry {
  // The last signal enqueued on the rank's stream: no stream of a peer waits for a later one.
  std::atomic<uint64_t> enqueued{0};
  std::atomic<uint64_t> steps{0};                    // rendezvous steps that the rank has completed
  std::array<RendezvousStepResult, 2> results = {};  // [step & 1]; written before `steps`
  ShareableHandle handle = {};                       // of its staging buffer
  std::array<char, 64> gpu = {};                     // identity of the GPU with the staging buffer
};

// Published descriptor of one symmetric GPU memory segment, which peers may open (see
// symmetric_memory.h).
struct alignas(64) ExportEntry {
  std::atomic<uint64_t> bytes{0};    // 0: not published; written after the handle
  std::atomic<uint64_t> openers{0};  // a bit for each rank that has it open or is opening it
  ShareableHandle handle = {};
};
// Maximum number of exported symmetric segments of one rank: each has a bit in a 64-bit word.
// torch's allocator requests either 20 MiB and more at once, or 2 MiB.
inline constexpr int kMaxExports = 64;

class SignalPad {
 public:
  SignalPad(std::byte* base, int world) : base_(base), world_(world) {}
  static constexpr std::size_t bytes(int world) {
    return ipc::SegmentLayout::up(sizeof(Counter) * (1 + world)) +
           world * (sizeof(PeerEntry) + kMaxExports * sizeof(ExportEntry));
  }

  // The guard word. If it is nonzero, launches with this guard write no results (see
  // Launch::guard).
  std::atomic<uint32_t>& aborted() const {
    return *reinterpret_cast<std::atomic<uint32_t>*>(base_);
  }
  Counter& counter(Rank r) const { return reinterpret_cast<Counter*>(base_)[1 + r]; }
  PeerEntry& entry(Rank r) const {
    return reinterpret_cast<PeerEntry*>(base_ + ipc::SegmentLayout::up(counter_bytes()))[r];
  }
  ExportEntry& export_entry(Rank r, int number) const {
    std::byte* const first =
        base_ + ipc::SegmentLayout::up(counter_bytes()) + world_ * sizeof(PeerEntry);
    return reinterpret_cast<ExportEntry*>(first)[r * kMaxExports + number];
  }
  // The part that devices access: whole pages from the beginning of the signal pad.
  std::byte* base() const { return base_; }
  std::size_t registered_bytes() const { return ipc::SegmentLayout::up(counter_bytes()); }
  std::size_t offset(Rank r) const { return sizeof(Counter) * (1 + r); }  // of the counter
  std::size_t offset_of_ended(Rank r) const { return offset(r) + offsetof(Counter, ended); }

 private:
  std::size_t counter_bytes() const { return sizeof(Counter) * (1 + world_); }
  std::byte* base_;
  int world_;
};

}  // namespace pycollect::cuda_ipc
