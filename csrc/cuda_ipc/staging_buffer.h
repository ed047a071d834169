// A rank's staging buffer: GPU memory exported through CUDA IPC, with mappings of every peer's. It
// has two slots that runs alternate between, preceded by patterns of the self-test. It is a
// separate allocation, so it can be exported whatever allocator the tensors use.
#pragma once
#include <vector>

#include "signal_pad.h"

namespace pycollect::cuda_ipc {

struct StagingBufferParams {
  Device device;
  Rank rank;
  int world;
  std::size_t buffer_bytes;
};

class StagingBuffer {
 public:
  // Bytes of one self-test pattern: one access of a thread. A buffer has a pattern written by each
  // rank, one read from each rank, and its owner's own.
  static constexpr std::size_t kPatternBytes = 16;

  StagingBuffer(CudaIpcMemory& gpu, const StagingBufferParams& params);
  // Unmaps all, unless `abandon`ed. A peer that has this rank's buffer open keeps its memory.
  ~StagingBuffer();
  StagingBuffer(const StagingBuffer&) = delete;
  StagingBuffer& operator=(const StagingBuffer&) = delete;

  ShareableHandle handle() { return gpu_.handle_of(params_.device, memory_[params_.rank]); }
  void open(Rank r, const ShareableHandle& handle);
  // Deliberately leaks the buffer and all mappings until the process ends: the device may still
  // access them.
  void abandon() { abandoned_ = true; }

  Device device() const { return params_.device; }
  Rank rank() const { return params_.rank; }
  int world() const { return params_.world; }
  std::size_t buffer_bytes() const { return params_.buffer_bytes; }
  std::byte* staging_buffer(Rank r, uint64_t run) const {
    return memory_[r] + kHead + (run & 1) * params_.buffer_bytes;
  }
  std::byte* pattern(Rank owner, int number) const {
    return memory_[owner] + number * kPatternBytes;
  }

 private:
  // A page for the patterns: 2 for each possible rank, and the owner's own.
  static constexpr std::size_t kHead = 4096;
  static_assert((2 * ipc::kMaxRanks + 1) * kPatternBytes <= kHead);

  CudaIpcMemory& gpu_;
  const StagingBufferParams params_;
  std::vector<std::byte*> memory_;  // [rank]: its staging buffer; null if it is not open
  bool abandoned_ = false;
};

}  // namespace pycollect::cuda_ipc
