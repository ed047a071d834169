#include "staging_buffer.h"

namespace pycollect::cuda_ipc {
namespace {

// Allocates device memory; if that fails, frees the tensor allocator's cached memory and retries.
std::byte* allocate(CudaIpcMemory& gpu, Device device, std::size_t bytes) {
  try {
    return gpu.allocate(device, bytes);
  } catch (const std::runtime_error&) {  // the second attempt reports its reason
    gpu.empty_cache(device);
    return gpu.allocate(device, bytes);
  }
}

}  // namespace

StagingBuffer::StagingBuffer(CudaIpcMemory& gpu, const StagingBufferParams& params)
    : gpu_(gpu), params_(params), memory_(params.world) {
  memory_[params.rank] =
      allocate(gpu_, params.device, whole_granules(kHead + 2 * params.buffer_bytes));
}

StagingBuffer::~StagingBuffer() {
  if (abandoned_) return;
  for (Rank r = 0; r < params_.world; ++r) {
    try {
      if (r == params_.rank)
        gpu_.free(params_.device, memory_[r]);
      else if (memory_[r] != nullptr)
        gpu_.close(params_.device, memory_[r]);
    } catch (...) {  // the device is broken, and its memory is gone with it
    }
  }
}

void StagingBuffer::open(Rank r, const ShareableHandle& handle) {
  memory_[r] = gpu_.open(params_.device, handle);
}

}  // namespace pycollect::cuda_ipc
