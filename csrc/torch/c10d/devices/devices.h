// What serving tensors on devices asks of the devices: copies, marks in their streams' work, memory
// that others reach, and whether a stream is under capture. The real ones are
// csrc/torch/cuda/torch_devices.cpp; `fakes` has some that only keep books, so the staging that is
// tested without a GPU is the one that runs.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../../../slabs/tracts.h"

namespace pycollect::dist {

// A point in the work of one stream.
class Mark {
 public:
  virtual ~Mark() = default;
  virtual bool reached() = 0;  // from any thread; throws what went wrong on the device
  // What follows on that device's current stream, of the calling thread, comes after it.
  virtual void hold_current(at::Device device) = 0;
};

struct Way {
  // On a device; as large and contiguous, in pinned memory or on the device of the group's stream.
  // Of a way that ends in pinned memory, that is `tensor`.
  at::Tensor tensor, dense;
};

class Devices {
 public:
  virtual ~Devices() = default;
  virtual bool serves(const at::Tensor& tensor) const = 0;
  virtual bool has(at::Device device) const = 0;     // may a tensor that it serves be there?
  virtual bool is_capturing(at::Device device) = 0;  // its current stream
  virtual at::Tensor new_pinned(const at::Tensor& like) = 0;  // in any thread
  // Behind what is on the current stream of the tensor's device, without waiting.
  virtual void copy_out(const Way& way) = 0;
  // There as well: what computes the one tensor from the other, and only launches.
  using Computation = std::function<void(const at::Tensor& into)>;
  virtual void compute(const at::Tensor& into, const at::Tensor& from, const Computation& how) = 0;
  virtual std::unique_ptr<Mark> mark(at::Device device) = 0;  // its current stream
  // The group's stream there, which no caller's work delays and no caller captures, comes to what
  // follows after the mark, of the same process.
  virtual void follow(at::Device device, Mark& after) = 0;
  // Behind what is on it: copies the ways back. Keeps their tensors' memory, and that of `kept`,
  // from others until that has happened, which is what the mark says.
  virtual std::unique_ptr<Mark> finish(at::Device device, const std::vector<Way>& ways,
                                       const std::vector<at::Tensor>& kept) = 0;

  // What processes reach each other's memory with; null: they cannot.
  virtual std::shared_ptr<slabs::Gpu> gpu() = 0;
  virtual slabs::Stream stream(at::Device device) = 0;  // the group's
  // Contiguous, of the same size, on that device; memory of the current stream's.
  virtual at::Tensor new_dense(const at::Tensor& like, at::Device device) = 0;
  // So many elements in this rank's memory that other processes reach; of the current stream's. The
  // same object each time. On the current device where none is named.
  virtual at::Tensor new_in_tract(const std::shared_ptr<slabs::Tracts>& tracts, at::Device device,
                                  int64_t count, at::ScalarType type) = 0;
  // The group has gone: gives back what of that memory no tensor is in.
  virtual void drop_pools() = 0;
  // The same devices, with streams of the group's that are apart from these.
  virtual std::shared_ptr<Devices> twin() = 0;
  // Does it with those streams as the current ones: an event that is recorded then comes when the
  // results are there.
  virtual void with_results(c10::ArrayRef<at::Device> devices, c10::function_ref<void()> act) = 0;
  // The same, of an act that completes a future.
  virtual void complete(c10::ArrayRef<at::Device> devices, c10::function_ref<void()> act) {
    with_results(devices, act);
  }
};

// Those that torch knows, for one group; in a build without CUDA they serve no tensor.
std::shared_ptr<Devices> torch_devices();

}  // namespace pycollect::dist
