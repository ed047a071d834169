// What serving tensors on devices asks of the devices: copies, marks in their streams' work, and
// whether a stream is under capture. The real ones are cuda/torch_devices.cpp; fake_devices.h has
// some that only keep books, so the staging that is tested without a GPU is the one that runs.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

#include <memory>
#include <utility>
#include <vector>

namespace pycollect::dist {

// A point in the work of one stream.
class Mark {
 public:
  virtual ~Mark() = default;
  virtual bool reached() = 0;  // from any thread; throws what went wrong on the device
  // What follows on its device's current stream, of the calling thread, comes after it.
  virtual void hold_current() = 0;
};

struct Way {
  at::Tensor tensor, host;  // on a device; as large in pinned memory, and contiguous
};

class Devices {
 public:
  virtual ~Devices() = default;
  virtual bool serves(const at::Tensor& tensor) const = 0;
  virtual bool is_capturing(at::Device device) = 0;  // its current stream
  virtual at::Tensor new_pinned(const at::Tensor& like) = 0;
  // Behind what is on the current stream of the tensor's device, without waiting.
  virtual void copy_out(const Way& way) = 0;
  virtual std::unique_ptr<Mark> mark(at::Device device) = 0;  // its current stream
  // Behind `after`, of the same device, on a stream of its own that no caller's work delays and no
  // caller captures. Keeps the tensors' memory from others until it has happened.
  virtual std::unique_ptr<Mark> copy_back(at::Device device, const std::vector<Way>& ways,
                                          Mark& after) = 0;
  // Does it with those streams as the current ones: an event that is recorded then comes when the
  // results are there.
  virtual void with_results(c10::ArrayRef<at::Device> devices, c10::function_ref<void()> act) = 0;
};

// Those that torch knows, for one group; in a build without CUDA they serve no tensor.
std::shared_ptr<Devices> torch_devices();

}  // namespace pycollect::dist
