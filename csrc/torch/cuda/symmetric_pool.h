// torch's caching allocator over a rank's symmetric memory on one device: what comes from there is
// an ordinary tensor, with streams, splits and record_stream as everywhere, and may outlive the
// group.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/cuda/MemPool.h>

#include <memory>
#include <mutex>
#include <optional>

#include "../c10d/staging/torch_runtime.h"

namespace pycollect::dist {

class SymmetricPool final : public TensorPool {
 public:
  // Throws std::runtime_error where no memory goes to other processes.
  SymmetricPool(std::shared_ptr<cuda_ipc::SymmetricMemory> symmetric_memory, at::Device device);
  SymmetricPool(const SymmetricPool&) = delete;
  SymmetricPool& operator=(const SymmetricPool&) = delete;

  at::Tensor empty(int64_t count, at::ScalarType type) override;

 private:
  const at::Device device_;
  std::mutex mutex_;  // torch lets one thread at a time ask a pool
  std::optional<at::cuda::MemPool> pool_;
};

}  // namespace pycollect::dist
