// A memory pool of torch's caching allocator in a rank's symmetric memory on one device. Its
// tensors are ordinary ones: streams, split blocks and record_stream work as for any tensor, and a
// tensor may outlive the group.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/cuda/MemPool.h>

#include <memory>
#include <mutex>

#include "../torch_runtime.h"

namespace pycollect {

class SymmetricPool final : public SharedTensorPool {
 public:
  // Throws std::runtime_error if no symmetric memory can be allocated.
  SymmetricPool(std::shared_ptr<cuda_ipc::SymmetricMemory> symmetric_memory, at::Device device);
  ~SymmetricPool() override;
  SymmetricPool(const SymmetricPool&) = delete;
  SymmetricPool& operator=(const SymmetricPool&) = delete;

  at::Tensor empty(int64_t count, at::ScalarType type) override;

 private:
  const at::Device device_;
  std::mutex mutex_;         // torch allows one thread at a time to allocate from a pool
  at::cuda::MemPool* pool_;  // never destroyed: it holds no memory itself
};

}  // namespace pycollect
