// See symmetric_pool.h. The pool's segments are symmetric memory instead of memory of cudaMalloc.
// torch keeps the pool's allocator, and with it the SymmetricMemory, as long as it has a segment of
// it. Such pools never use expandable segments, whatever PYTORCH_CUDA_ALLOC_CONF is.
#include "symmetric_pool.h"

#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <thread>

#include "../../cuda/check.h"
#include "../../cuda/device_guard.h"
#include "api.h"

namespace pycollect {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

// Called while torch holds its allocator's lock. Null means to torch that the device is out of
// memory.
void* allocate(cuda_ipc::SymmetricMemory& symmetric_memory, int device, std::size_t bytes) {
  try {
    return symmetric_memory.add(device, bytes);
  } catch (const std::exception&) {
    return nullptr;
  }
}

// torch waits for the streams that were recorded, but not for the one the memory was allocated for,
// as cudaFree does. Memory that cannot be waited for is never reused.
void free(cuda_ipc::SymmetricMemory& symmetric_memory, int device, void* memory) {
  try {
    const cuda::CaptureModeGuard guard(cuda_api(), device);
    cuda::check(cudaDeviceSynchronize());
  } catch (const std::exception&) {
    return;
  }
  symmetric_memory.give_back(static_cast<std::byte*>(memory));
}

std::shared_ptr<caching::CUDAAllocator> allocator_over(
    std::shared_ptr<cuda_ipc::SymmetricMemory> symmetric_memory) {
  return torch::cuda::CUDAPluggableAllocator::createCustomAllocator(
      [symmetric_memory](std::size_t bytes, int device, cudaStream_t) {
        return allocate(*symmetric_memory, device, bytes);
      },
      [symmetric_memory](void* memory, std::size_t, int device, cudaStream_t) {
        free(*symmetric_memory, device, memory);
      });
}

// While a PoolScope exists, its thread's allocations on the device come from the pool.
class PoolScope {
 public:
  PoolScope(c10::DeviceIndex device, c10::MempoolId_t pool) : device_(device), pool_(pool) {
    caching::beginAllocateToPool(device, pool, [thread = std::this_thread::get_id()](cudaStream_t) {
      return std::this_thread::get_id() == thread;
    });
  }
  ~PoolScope() {
    caching::endAllocateToPool(device_, pool_);
    caching::releasePool(device_, pool_);  // beginAllocateToPool added a reference
  }
  PoolScope(const PoolScope&) = delete;
  PoolScope& operator=(const PoolScope&) = delete;

 private:
  const c10::DeviceIndex device_;
  const c10::MempoolId_t pool_;
};

}  // namespace

SymmetricPool::SymmetricPool(std::shared_ptr<cuda_ipc::SymmetricMemory> symmetric_memory,
                             at::Device device)
    : device_(device) {
  const c10::cuda::CUDAGuard guard(device);  // MemPool belongs to the current device
  // A first segment, so that the way to export memory is found now, not while torch holds its lock.
  symmetric_memory->give_back(symmetric_memory->add(device.index(), 1));
  pool_ = new at::cuda::MemPool(allocator_over(std::move(symmetric_memory)));
}

// Does what the destructor of MemPool does. That one ends the process if torch refuses to free
// memory, because a thread captures a graph or allocates from another pool.
SymmetricPool::~SymmetricPool() {
  try {
    caching::releasePool(device_.index(), pool_->id());
    caching::emptyCache(pool_->id());
  } catch (const std::exception&) {  // torch frees the memory when it next empties its cache
  }
}

at::Tensor SymmetricPool::empty(int64_t count, at::ScalarType type) {
  const c10::cuda::CUDAGuard guard(device_);
  const auto attempt = [&] {
    const std::lock_guard lock(mutex_);
    const PoolScope scope(device_.index(), pool_->id());
    return at::Tensor(at::detail::empty_cuda({count}, type, device_, std::nullopt));
  };
  try {
    return attempt();
  } catch (const c10::OutOfMemoryError&) {
    // torch frees none of its cached memory for an allocation in a pool.
    caching::emptyCache();
    return attempt();
  }
}

}  // namespace pycollect
