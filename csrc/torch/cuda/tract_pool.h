// torch's caching allocator over a rank's tracts on one device: what comes from there is an
// ordinary tensor, with streams, splits and record_stream as everywhere, and may outlive the group.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/cuda/MemPool.h>

#include <memory>
#include <mutex>
#include <optional>

#include "../c10d/devices/torch_runtime.h"

namespace pycollect::dist {

class TractPool final : public Pool {
 public:
  // Throws std::runtime_error where no memory goes to other processes.
  TractPool(std::shared_ptr<slabs::Tracts> tracts, at::Device device);
  TractPool(const TractPool&) = delete;
  TractPool& operator=(const TractPool&) = delete;

  at::Tensor empty(int64_t count, at::ScalarType type) override;

 private:
  const at::Device device_;
  std::mutex mutex_;  // torch lets one thread at a time ask a pool
  std::optional<at::cuda::MemPool> pool_;
};

}  // namespace pycollect::dist
