// Device operations that only torch provides: current streams, memory ownership and tensor copies.
// torch/cuda/torch_runtime.cpp implements it for CUDA; the tests have implementations without a
// device.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

#include <functional>
#include <memory>

#include "../cuda/pinned_ring.h"

namespace pycollect {

struct ListCall;

class TorchRuntime {
 public:
  virtual ~TorchRuntime() = default;
  virtual cuda::Api& cuda() = 0;

  virtual bool serves(const at::Tensor& tensor) const = 0;
  virtual bool has(at::Device device) const = 0;  // whether served tensors can be there
  virtual int devices() const = 0;                // number of the process's devices
  // Returns the device with the current index if it has none.
  virtual at::Device with_index(at::Device device) const = 0;
  virtual cuda::Stream current_stream(at::Device device) = 0;
  virtual cuda::Stream stream_of(c10::Stream stream) = 0;  // the same stream
  // Returns a stream that nobody else uses, until it is given back. It is never destroyed, because
  // torch's allocators may have recorded it.
  virtual cuda::Stream new_stream(at::Device device) = 0;
  virtual void give_back(cuda::Stream stream) = 0;
  // Calls `act` with `streams`, at most one of each device, as the calling thread's current
  // streams.
  virtual void with_streams(c10::ArrayRef<cuda::Stream> streams, c10::function_ref<void()> act) = 0;
  // Like with_streams(), for an `act` that completes a future.
  virtual void complete(c10::ArrayRef<cuda::Stream> streams, c10::function_ref<void()> act) {
    with_streams(streams, act);
  }

  // Returns contiguous memory, on a device for its current stream. Bypasses the dispatcher, whose
  // modes may substitute a tensor without memory.
  virtual at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type, at::Device device) = 0;
  virtual at::Tensor empty_pinned(at::IntArrayRef sizes, at::ScalarType type) = 0;
  // Returns whether torch has begun this capture, so that its allocator keeps the memory that it
  // allocates meanwhile, on one device, until the graph is destroyed. False if that is not known.
  virtual bool keeps_memory_of(uint64_t capture) = 0;
  // Prevents reuse of the tensor's memory, on a device or pinned, after the tensor is freed and
  // before the stream's work at that time is done. copy() does the same with pinned memory. Returns
  // false if it has no effect because another allocator, such as CuPy's, owns the memory: keep the
  // tensor instead.
  virtual bool record_stream(const at::Tensor& tensor, cuda::Stream stream) = 0;

  // The host's part of copies of pageable memory, and whether an address is in such memory. Not
  // defined for memory of zero bytes.
  virtual cuda::HostMemoryOps& host_memory() = 0;
  virtual bool is_pageable(const void* address) = 0;
  // Returns whether work on `from` can access the memory of `to`.
  virtual bool reaches(at::Device from, at::Device to) = 0;

  // Enqueues a collective on the tensors of all ranks of a list, on the current streams of their
  // devices.
  virtual void run_list_call(const ListCall& call) = 0;

  // Both enqueue on the current streams of the tensors' devices without waiting. `how` must only
  // launch, and never wait for a device.
  virtual void copy(const at::Tensor& to, const at::Tensor& from) = 0;
  using Computation = std::function<void(const at::Tensor& into)>;
  virtual void compute(const at::Tensor& into, const at::Tensor& from, const Computation& how) = 0;
};

// Returns torch's own CUDA runtime; null in a build without CUDA.
std::shared_ptr<TorchRuntime> torch_runtime();

}  // namespace pycollect
