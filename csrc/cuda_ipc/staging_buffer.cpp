#include "staging_buffer.h"

namespace pycollect::cuda_ipc {
namespace {

// Allocates device memory; if that fails, frees the tensor allocator's cached memory and retries.
std::byte* allocate(IpcGpu& gpu, Device device, std::size_t bytes) {
  try {
    return gpu.allocate(device, bytes);
  } catch (const std::runtime_error&) {  // the second attempt reports its reason
    gpu.make_room(device);
    return gpu.allocate(device, bytes);
  }
}

}  // namespace

StagingBuffer::StagingBuffer(IpcGpu& gpu, const StagingBufferParams& terms)
    : gpu_(gpu), terms_(terms), memory_(terms.world) {
  memory_[terms.rank] =
      allocate(gpu_, terms.device, whole_granules(kHead + 2 * terms.buffer_bytes));
}

StagingBuffer::~StagingBuffer() {
  if (abandoned_) return;
  for (Rank r = 0; r < terms_.world; ++r) {
    try {
      if (r == terms_.rank)
        gpu_.free(terms_.device, memory_[r]);
      else if (memory_[r] != nullptr)
        gpu_.close(terms_.device, memory_[r]);
    } catch (...) {  // the device is broken, and its memory is gone with it
    }
  }
}

void StagingBuffer::open(Rank r, const MemHandle& handle) {
  memory_[r] = gpu_.open(terms_.device, handle);
}

}  // namespace pycollect::cuda_ipc
