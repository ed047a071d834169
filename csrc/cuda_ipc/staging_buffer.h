// A rank's staging buffer: GPU memory exported through CUDA IPC, with mappings of every peer's. It
// has two slots that runs alternate between, preceded by marks for the self-test. It is a separate
// allocation, so it can be exported whatever allocator the tensors use.
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
  // Bytes of one self-test mark: one access of a thread. A buffer has marks written by each rank,
  // marks read from each rank, and its owner's own mark.
  static constexpr std::size_t kMarkBytes = 16;

  StagingBuffer(IpcGpu& gpu, const StagingBufferParams& terms);
  // Unmaps all, unless `abandon`ed. A peer that has this rank's buffer open keeps its memory.
  ~StagingBuffer();
  StagingBuffer(const StagingBuffer&) = delete;
  StagingBuffer& operator=(const StagingBuffer&) = delete;

  MemHandle handle() { return gpu_.handle_of(terms_.device, memory_[terms_.rank]); }
  void open(Rank r, const MemHandle& handle);
  // The device may still access it: deliberately leaks all of it until the process ends.
  void abandon() { abandoned_ = true; }

  Device device() const { return terms_.device; }
  Rank rank() const { return terms_.rank; }
  int world() const { return terms_.world; }
  std::size_t buffer_bytes() const { return terms_.buffer_bytes; }
  std::byte* staging_buffer(Rank r, uint64_t run) const {
    return memory_[r] + kHead + (run & 1) * terms_.buffer_bytes;
  }
  std::byte* mark(Rank of, int number) const { return memory_[of] + number * kMarkBytes; }

 private:
  // A page for the marks: 2 for each possible rank, and the owner's own mark.
  static constexpr std::size_t kHead = 4096;
  static_assert((2 * shm::kMaxRanks + 1) * kMarkBytes <= kHead);

  IpcGpu& gpu_;
  const StagingBufferParams terms_;
  std::vector<std::byte*> memory_;  // [rank]: its staging buffer; null if it is not open
  bool abandoned_ = false;
};

}  // namespace pycollect::cuda_ipc
