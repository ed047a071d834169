// torch's devices without a device: CPU tensors as if they were on one, with callers' streams and
// the groups', in front of an emulator that runs. What is read too soon is poison or somebody
// else's, and what CUDA would refuse is refused.
#pragma once
#include "../../torch/c10d/devices/torch_runtime.h"
#include "emulated_cache.h"

namespace pycollect::dist {

class EmulatedTorch final : public TorchRuntime {
 public:
  // `shares`: processes can reach each other's memory on the devices.
  EmulatedTorch(bool eager, bool shares);
  ~EmulatedTorch() override;

  cuda::Api& cuda() override { return *emulator_; }
  bool shares_memory() const override { return shares_; }
  bool serves(const at::Tensor& tensor) const override;
  bool has(at::Device device) const override { return device.is_cpu(); }
  at::Device with_index(at::Device) const override { return at::kCPU; }  // there is one device
  cuda::Stream current_stream(at::Device device) override;
  cuda::Stream new_stream(at::Device device) override;
  void with_streams(c10::ArrayRef<cuda::Stream> streams, c10::function_ref<void()> act) override;
  void complete(c10::ArrayRef<cuda::Stream> streams, c10::function_ref<void()> act) override;
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type, at::Device device) override;
  at::Tensor empty_pinned(at::IntArrayRef sizes, at::ScalarType type) override;
  std::unique_ptr<Pool> new_pool(std::shared_ptr<slabs::Tracts> tracts, at::Device device) override;
  void empty_cache() override;
  void record_stream(const at::Tensor& tensor, cuda::Stream stream) override;
  void copy(const at::Tensor& to, const at::Tensor& from) override;
  void compute(const at::Tensor& into, const at::Tensor& from, const Computation& how) override;

  // The scenery.
  void put_on_host(const at::Tensor& tensor);               // this one is an ordinary CPU tensor
  void fill_later(const at::Tensor& tensor, double value);  // the caller's stream does
  void use_second_stream(bool on);  // of the caller's: it is the current one
  void finish_caller();             // its first stream does all that it has
  // ... or comes to nothing more, or only so many pieces of work.
  void stall(bool on, int after);
  void capture(bool on);  // the caller captures
  int pinned() const { return pinned_->made(); }
  const std::shared_ptr<cuda::Emulator>& emulator() const { return emulator_; }

 private:
  std::size_t number(cuda::Stream stream) const { return emulator_->number(stream); }
  bool is_kept(const at::Tensor& tensor, cuda::Stream stream) const;
  at::Tensor reached(const at::Tensor& tensor) const;
  void enqueue(const char* call, std::initializer_list<at::Tensor> touched,
               std::function<void()> act);

  const bool shares_;
  const std::shared_ptr<cuda::Emulator> emulator_;
  std::recursive_mutex& mutex_;
  const std::shared_ptr<EmulatedCache> cache_, pinned_;
  const cuda::Stream caller_, second_;
  cuda::Stream current_;  // the caller's
  std::vector<c10::Storage> on_host_;
  // What of others' memory a stream was told to keep, for as long as it is somebody's.
  std::vector<std::pair<cuda::Stream, c10::weak_intrusive_ptr<c10::StorageImpl>>> kept_;
};

}  // namespace pycollect::dist
