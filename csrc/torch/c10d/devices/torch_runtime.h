// What only torch knows of devices: which streams are current, whose memory is whose, and how a
// tensor is copied. The real one is torch/cuda/torch_runtime.cpp; the tests have one whose devices'
// tensors are the CPU's.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

#include <functional>
#include <memory>

#include "../../../slabs/tracts.h"

namespace pycollect::dist {

// Tensors of one device in memory that other processes reach.
class Pool {
 public:
  virtual ~Pool() = default;
  virtual at::Tensor empty(int64_t count, at::ScalarType type) = 0;  // of the current stream's
};

class TorchRuntime {
 public:
  virtual ~TorchRuntime() = default;
  virtual cuda::Api& cuda() = 0;
  virtual bool shares_memory() const = 0;  // can processes reach each other's on the devices?

  virtual bool serves(const at::Tensor& tensor) const = 0;
  virtual bool has(at::Device device) const = 0;  // may a tensor that it serves be there?
  virtual at::Device with_index(
      at::Device device) const = 0;  // the current one where there is none
  virtual cuda::Stream current_stream(at::Device device) = 0;
  virtual cuda::Stream new_stream(at::Device device) = 0;  // that no caller has as its current one
  // Does it with those streams as the current ones of the calling thread.
  virtual void with_streams(c10::ArrayRef<cuda::Stream> streams, c10::function_ref<void()> act) = 0;
  // The same, of an act that completes a future.
  virtual void complete(c10::ArrayRef<cuda::Stream> streams, c10::function_ref<void()> act) {
    with_streams(streams, act);
  }

  // Contiguous. Not through the dispatcher, whose modes may put something without
  // memory in its place. On a device, memory of its current stream's.
  virtual at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type, at::Device device) = 0;
  virtual at::Tensor empty_pinned(at::IntArrayRef sizes, at::ScalarType type) = 0;
  // Throws std::runtime_error where no memory goes to other processes.
  virtual std::unique_ptr<Pool> new_pool(std::shared_ptr<slabs::Tracts> tracts,
                                         at::Device device) = 0;
  virtual void empty_cache() = 0;
  // The stream has to do with the tensor's memory: it is nobody else's before what is on the stream
  // when the tensor goes is done. Pinned memory's copies see to that themselves.
  virtual void record_stream(const at::Tensor& tensor, cuda::Stream stream) = 0;

  // On the current streams of the tensors' devices, without waiting. `how` only launches.
  virtual void copy(const at::Tensor& to, const at::Tensor& from) = 0;
  using Computation = std::function<void(const at::Tensor& into)>;
  virtual void compute(const at::Tensor& into, const at::Tensor& from, const Computation& how) = 0;
};

// That of torch's own CUDA; null in a build without.
std::shared_ptr<TorchRuntime> torch_runtime();

}  // namespace pycollect::dist
