// Implements TorchRuntime with torch's CUDA: its streams, its copies, and its pinned memory, whose
// blocks it does not reuse before the copies that access them have ended.
#include "../torch_runtime.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>
#include <torch/version.h>

#include <mutex>
#include <vector>

#include "../gpus.h"
#include "../threads.h"
#include "api.h"

namespace pycollect {
namespace {

using c10::cuda::CUDAGuard;
using c10::cuda::CUDAStream;

// Pinned memory of torch, which is never freed, and copies by torch's threads.
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

cuda::HostMemoryOps& torch_host_memory_ops() {
  static TorchHostMemoryOps host;
  return host;
}

class CudaRuntime final : public TorchRuntime {
 public:
  cuda::Api& cuda() override { return cuda_api(); }

  bool serves(const at::Tensor& tensor) const override { return tensor.is_cuda(); }
  bool has(at::Device device) const override { return device.is_cuda(); }
  int devices() const override { return c10::cuda::device_count(); }
  at::Device with_index(at::Device device) const override {
    return device.has_index() ? device : at::Device(device.type(), c10::cuda::current_device());
  }
  cuda::Stream current_stream(at::Device device) override {
    return api_stream(c10::cuda::getCurrentCUDAStream(device.index()));
  }
  cuda::Stream stream_of(c10::Stream stream) override { return api_stream(CUDAStream(stream)); }
  // Not one of torch's pooled streams, which other libraries and users have, too.
  cuda::Stream new_stream(at::Device device) override {
    {
      const std::lock_guard lock(mutex_);
      for (auto& s : idle_) {
        if (s.device != device.index() || !is_idle(s)) continue;
        const cuda::Stream found = s;
        s = idle_.back();
        idle_.pop_back();
        return found;
      }
    }
    const cuda::CaptureModeGuard guard(cuda_api(), device.index());
    return cuda_api().create_stream(device.index());
  }
  void give_back(cuda::Stream stream) override {
    const std::lock_guard lock(mutex_);
    idle_.push_back(stream);
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
  bool keeps_memory_of([[maybe_unused]] uint64_t capture) override {
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 14)
    return at::cuda::get_graph_from_capture_id(capture) != nullptr;
#else
    return false;  // torch does not tell
#endif
  }
  bool record_stream(const at::Tensor& tensor, cuda::Stream stream) override {
    const c10::DataPtr& memory = tensor.storage().data_ptr();
    if (!tensor.is_cuda()) {
      at::HostAllocator* const pinned = at::getHostAllocator(at::kCUDA);
      return !tensor.is_pinned() || pinned->record_event(tensor.data_ptr(), memory.get_context(),
                                                         torch_stream(stream).unwrap());
    }
    // Not asked for other memory, which cudaMallocAsync's allocator does not accept. A pluggable
    // allocator may do nothing.
    auto* const allocator = c10::cuda::CUDACachingAllocator::get();
    if (memory.get_deleter() != allocator->raw_deleter()) return false;
    allocator->recordStream(memory, torch_stream(stream));
    return allocator->name() != "pluggable";
  }

  cuda::HostMemoryOps& host_memory() override { return torch_host_memory_ops(); }
  bool is_pageable(const void* address) override {
    return !at::detail::getCUDAHooks().isPinnedPtr(address);
  }
  bool reaches(at::Device from, at::Device to) override {
    return peers().access(from.index(), to.index()).works();
  }
  void run_list_call(const ListCall& call) override { gpu_calls(at::kCUDA).run(call); }

  // Bypasses autograd and version counters, so that inference tensors can be copied, too.
  void copy(const at::Tensor& to, const at::Tensor& from) override {
    const CUDAGuard guard(from.is_cuda() ? from.device() : to.device());
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    copyable(to).copy_(copyable(from), /*non_blocking=*/true);
  }
  void compute(const at::Tensor& into, const at::Tensor&, const Computation& how) override {
    how(into);
  }

 private:
  static bool is_idle(cuda::Stream stream) {
    const cuda::CaptureModeGuard guard(cuda_api(), stream.device);
    const cudaError_t state = cudaStreamQuery(static_cast<cudaStream_t>(stream.handle));
    if (state != cudaSuccess) static_cast<void>(cudaGetLastError());
    return state == cudaSuccess;
  }

  std::mutex mutex_;
  std::vector<cuda::Stream> idle_;  // streams that were given back; their work may be pending
};

}  // namespace

std::shared_ptr<TorchRuntime> torch_runtime() { return std::make_shared<CudaRuntime>(); }

}  // namespace pycollect
