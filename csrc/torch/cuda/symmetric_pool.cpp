// See symmetric_pool.h. A pool of torch's whose segments are not cudaMalloc's but symmetric memory:
// torch keeps the allocator, and with it that memory, for as long as it has a segment of them. Such
// pools have plain segments whatever PYTORCH_CUDA_ALLOC_CONF says of expandable ones.
#include "symmetric_pool.h"

#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <thread>

namespace pycollect::dist {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

// Called with torch's lock. None is what torch says for that the device is out of memory.
void* allocate(cuda_ipc::SymmetricMemory& symmetric_memory, int device, std::size_t bytes) {
  try {
    return symmetric_memory.add(device, bytes);
  } catch (const std::exception&) {
    return nullptr;
  }
}

std::shared_ptr<caching::CUDAAllocator> allocator_over(
    std::shared_ptr<cuda_ipc::SymmetricMemory> symmetric_memory) {
  return torch::cuda::CUDAPluggableAllocator::createCustomAllocator(
      [symmetric_memory](std::size_t bytes, int device, cudaStream_t) {
        return allocate(*symmetric_memory, device, bytes);
      },
      [symmetric_memory](void* memory, std::size_t, int, cudaStream_t) {
        symmetric_memory->give_back(static_cast<std::byte*>(memory));
      });
}

// What this thread allocates on the device meanwhile comes from the pool.
class PoolScope {
 public:
  PoolScope(c10::DeviceIndex device, c10::MempoolId_t pool) : device_(device), pool_(pool) {
    caching::beginAllocateToPool(device, pool, [me = std::this_thread::get_id()](cudaStream_t) {
      return std::this_thread::get_id() == me;
    });
  }
  ~PoolScope() {
    caching::endAllocateToPool(device_, pool_);
    caching::releasePool(device_, pool_);  // the begin has counted as one more user of it
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
  const c10::cuda::CUDAGuard guard(device);  // a pool is of the current device
  // In which way memory goes to other processes is found out now, and not under torch's lock.
  symmetric_memory->give_back(symmetric_memory->add(device.index(), 1));
  pool_.emplace(allocator_over(std::move(symmetric_memory)));
}

at::Tensor SymmetricPool::empty(int64_t count, at::ScalarType type) {
  const c10::cuda::CUDAGuard guard(device_);
  const auto attempt = [&] {
    const std::lock_guard lock(mutex_);
    const PoolScope route(device_.index(), pool_->id());
    return at::Tensor(at::detail::empty_cuda({count}, type, device_, std::nullopt));
  };
  try {
    return attempt();
  } catch (const c10::OutOfMemoryError&) {  // torch frees no cache while memory is of a pool
    caching::emptyCache();
    return attempt();
  }
}

}  // namespace pycollect::dist
