// See tract_pool.h. A pool of torch's whose segments are not cudaMalloc's but tracts: torch keeps
// the allocator, and with it the tracts, for as long as it has a segment of them. Such pools have
// plain segments whatever PYTORCH_CUDA_ALLOC_CONF says of expandable ones.
#include "tract_pool.h"

#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <thread>

namespace pycollect::dist {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

// Called with torch's lock. None is what torch frees its caches for, asks again, and then says that
// the device is out of memory.
void* allocate(slabs::Tracts& tracts, int device, std::size_t bytes) {
  try {
    return tracts.add(device, bytes);
  } catch (const std::runtime_error&) {
    return nullptr;
  }
}

std::shared_ptr<caching::CUDAAllocator> allocator_over(std::shared_ptr<slabs::Tracts> tracts) {
  return torch::cuda::CUDAPluggableAllocator::createCustomAllocator(
      [tracts](std::size_t bytes, int device, cudaStream_t) {
        return allocate(*tracts, device, bytes);
      },
      [tracts](void* memory, std::size_t, int, cudaStream_t) {
        tracts->give_back(static_cast<std::byte*>(memory));
      });
}

// What this thread allocates on the device meanwhile comes from the pool.
class Route {
 public:
  Route(c10::DeviceIndex device, c10::MempoolId_t pool) : device_(device), pool_(pool) {
    caching::beginAllocateToPool(device, pool, [me = std::this_thread::get_id()](cudaStream_t) {
      return std::this_thread::get_id() == me;
    });
  }
  ~Route() {
    caching::endAllocateToPool(device_, pool_);
    caching::releasePool(device_, pool_);  // the begin has counted as one more user of it
  }
  Route(const Route&) = delete;
  Route& operator=(const Route&) = delete;

 private:
  const c10::DeviceIndex device_;
  const c10::MempoolId_t pool_;
};

}  // namespace

TractPool::TractPool(std::shared_ptr<slabs::Tracts> tracts, at::Device device) : device_(device) {
  const c10::cuda::CUDAGuard guard(device);  // a pool is of the current device
  pool_.emplace(allocator_over(std::move(tracts)));
}

at::Tensor TractPool::empty(int64_t count, at::ScalarType type) {
  const c10::cuda::CUDAGuard guard(device_);
  const std::lock_guard lock(mutex_);
  const Route route(device_.index(), pool_->id());
  return at::Tensor(at::detail::empty_cuda({count}, type, device_, std::nullopt));
}

}  // namespace pycollect::dist
