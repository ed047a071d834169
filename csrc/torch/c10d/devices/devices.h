// The devices of one group's tensors: copies, marks in their streams' work, memory that others
// reach, and whether a stream is under capture.
#pragma once
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "torch_runtime.h"

namespace pycollect::dist {

// A point in the work of one stream.
class Mark {
 public:
  Mark(std::shared_ptr<TorchRuntime> torch, cuda::Stream stream);
  ~Mark();
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;

  bool reached() const;  // from any thread; throws what went wrong on the device
  // What follows on that device's current stream, of the calling thread, comes after it.
  void hold_current(at::Device device) const { hold(torch_->current_stream(device)); }
  void hold(cuda::Stream stream) const;

 private:
  const std::shared_ptr<TorchRuntime> torch_;
  cuda::Event event_;
};

struct Way {
  // On a device; as large and contiguous, in pinned memory or on the device of the group's stream.
  // Of a way that ends in pinned memory, that is `tensor`.
  at::Tensor tensor, dense;
};

class Devices {
 public:
  // Null: there are none, and no tensor is served.
  explicit Devices(std::shared_ptr<TorchRuntime> torch);
  // The same devices, with streams of the group's that are apart from these.
  std::shared_ptr<Devices> twin() const { return std::make_shared<Devices>(torch_); }

  bool serves(const at::Tensor& tensor) const { return torch_ && torch_->serves(tensor); }
  bool has(at::Device device) const { return torch_ && torch_->has(device); }
  bool is_capturing(at::Device device);  // its current stream

  at::Tensor new_pinned(const at::Tensor& like);  // in any thread
  // Contiguous, of the same size, on that device; memory of the current stream's.
  at::Tensor new_dense(const at::Tensor& like, at::Device device);
  // Behind what is on the current stream of the tensor's device, without waiting.
  void copy_out(const Way& way);
  // There as well: what computes the one tensor from the other, and only launches.
  void compute(const at::Tensor& into, const at::Tensor& from,
               const TorchRuntime::Computation& how) {
    torch_->compute(into, from, how);
  }
  std::unique_ptr<Mark> mark(at::Device device);  // its current stream
  // The group's stream there, which no caller's work delays and no caller captures, comes to what
  // follows after the mark, of the same process.
  void follow(at::Device device, const Mark& after) { after.hold(stream(device)); }
  // Behind what is on it: copies the ways back. Keeps their tensors' memory, and that of `kept`,
  // from others until that has happened, which is what the mark says.
  std::unique_ptr<Mark> finish(at::Device device, const std::vector<Way>& ways,
                               const std::vector<at::Tensor>& kept);
  // Does it with the group's streams as the current ones: an event that is recorded then comes when
  // the results are there.
  void with_results(const std::vector<at::Device>& devices, c10::function_ref<void()> act);
  // The same, of an act that completes a future.
  void complete(const std::vector<at::Device>& devices, c10::function_ref<void()> act);

  // What processes reach each other's memory with; null: they cannot.
  const std::shared_ptr<slabs::Gpu>& gpu() const { return gpu_; }
  cuda::Stream stream(at::Device device);  // the group's
  // So many elements in this rank's memory that other processes reach; of the current stream's. The
  // same object each time. On the current device where none is named.
  at::Tensor new_in_tract(const std::shared_ptr<slabs::Tracts>& tracts, at::Device device,
                          int64_t count, at::ScalarType type);
  // The group has gone: gives back what of that memory no tensor is in.
  void drop_pools();

 private:
  std::vector<cuda::Stream> streams(const std::vector<at::Device>& devices);
  std::shared_ptr<Pool> pool_on(at::Device device, const std::shared_ptr<slabs::Tracts>& tracts);
  std::shared_ptr<Pool> make_pool(at::Device device, const std::shared_ptr<slabs::Tracts>& tracts);

  const std::shared_ptr<TorchRuntime> torch_;
  const std::shared_ptr<slabs::Gpu> gpu_;
  std::mutex mutex_;
  std::map<c10::DeviceIndex, cuda::Stream> streams_;         // the group's
  std::map<c10::DeviceIndex, std::shared_ptr<Pool>> pools_;  // null: there is no such memory
};

}  // namespace pycollect::dist
