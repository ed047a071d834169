// Implements TorchRuntime with torch's CUDA: its streams, its copies, and its pinned memory, whose
// blocks it does not reuse before the copies that access them have ended.
#include "../c10d/staging/torch_runtime.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include "../gpus.h"
#include "api.h"
#include "host_memory_ops.h"
#include "symmetric_pool.h"

namespace pycollect::dist {
namespace {

using c10::cuda::CUDAGuard;
using c10::cuda::CUDAStream;

class CudaRuntime final : public TorchRuntime {
 public:
  cuda::Api& cuda() override { return cuda_api(); }
  bool shares_memory() const override { return true; }

  bool serves(const at::Tensor& tensor) const override { return tensor.is_cuda(); }
  bool has(at::Device device) const override { return device.is_cuda(); }
  at::Device with_index(at::Device device) const override {
    return device.has_index() ? device : at::Device(device.type(), c10::cuda::current_device());
  }
  cuda::Stream current_stream(at::Device device) override {
    return api_stream(c10::cuda::getCurrentCUDAStream(device.index()));
  }
  cuda::Stream new_stream(at::Device device) override {
    return api_stream(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device.index()));
  }
  void with_streams(c10::ArrayRef<cuda::Stream> streams, c10::function_ref<void()> act) override {
    std::vector<CUDAStream> all;
    for (const cuda::Stream& s : streams) all.push_back(torch_stream(s));
    const c10::cuda::CUDAMultiStreamGuard guard(all);
    act();
  }

  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type, at::Device device) override {
    const CUDAGuard guard(device);
    return at::Tensor(at::detail::empty_cuda(sizes, type, device, std::nullopt));
  }
  at::Tensor empty_pinned(at::IntArrayRef sizes, at::ScalarType type) override {
    return at::Tensor(at::detail::empty_cpu(sizes, type, /*pin_memory=*/true));
  }
  std::unique_ptr<SharedTensorPool> new_pool(
      std::shared_ptr<cuda_ipc::SymmetricMemory> symmetric_memory, at::Device device) override {
    return std::make_unique<SymmetricPool>(std::move(symmetric_memory), device);
  }
  void empty_cache() override { c10::cuda::CUDACachingAllocator::emptyCache(); }
  void record_stream(const at::Tensor& tensor, cuda::Stream stream) override {
    if (tensor.is_cuda())
      c10::cuda::CUDACachingAllocator::recordStream(tensor.storage().data_ptr(),
                                                    torch_stream(stream));
  }

  void run_list_call(const PreparedCall& call) override { run_on_gpus(call); }

  // Bypasses autograd and version counters, so that inference tensors can be copied, too.
  void copy(const at::Tensor& to, const at::Tensor& from) override {
    const CUDAGuard guard(from.is_cuda() ? from.device() : to.device());
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    to.copy_(from, /*non_blocking=*/true);
  }
  void compute(const at::Tensor& into, const at::Tensor&, const Computation& how) override {
    how(into);
  }
};

}  // namespace

std::shared_ptr<TorchRuntime> torch_runtime() { return std::make_shared<CudaRuntime>(); }

}  // namespace pycollect::dist
