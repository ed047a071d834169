// Implements cuda::HostMemoryOps: pinned memory of torch, which is never freed, and copies by
// torch's threads.
#include "host_memory_ops.h"

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAFunctions.h>

#include "../gpus.h"
#include "../threads.h"

namespace pycollect {
namespace {

class TorchHostMemoryOps final : public cuda::HostMemoryOps {
 public:
  std::byte* new_pinned(std::size_t bytes) override {
    const at::Device current(at::kCUDA, c10::cuda::current_device());
    const auto size = static_cast<int64_t>(bytes);
    const at::Tensor& memory = *new at::Tensor(new_pinned_bytes(size, current));  // never freed
    return static_cast<std::byte*>(memory.mutable_data_ptr());
  }
  void copy(const cuda::CopyRect& r) override { copy_on_host(r); }
};

}  // namespace

cuda::HostMemoryOps& torch_host_memory_ops() {
  static TorchHostMemoryOps host;
  return host;
}

}  // namespace pycollect
