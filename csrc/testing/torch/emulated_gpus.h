// Emulates GPUs for list calls: tensors of torch's device type PrivateUse1 lie in the memory of a
// recording emulator, and torch's caching allocator, streams and captures are emulated as far as
// list calls depend on them. Calls only record a trace, which is checked for races and run later.
#pragma once
#include <map>

#include "../../torch/torch_runtime.h"
#include "../emulator.h"

namespace pycollect {

class EmulatedGpus final : public TorchRuntime, public std::enable_shared_from_this<EmulatedGpus> {
 public:
  static constexpr c10::DeviceType kKind = c10::DeviceType::PrivateUse1;
  explicit EmulatedGpus(int devices);

  cuda::Api& cuda() override { return *emulator_; }
  bool serves(const at::Tensor& tensor) const override { return has(tensor.device()); }
  bool has(at::Device device) const override { return device.type() == kKind; }
  int devices() const override { return static_cast<int>(current_.size()); }
  at::Device with_index(at::Device device) const override;
  cuda::Stream current_stream(at::Device device) override { return current_.at(device.index()); }
  cuda::Stream stream_of(c10::Stream stream) override;
  cuda::Stream new_stream(at::Device device) override;
  void give_back(cuda::Stream) override {}
  void with_streams(c10::ArrayRef<cuda::Stream> streams, c10::function_ref<void()> act) override;
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type, at::Device device) override;
  at::Tensor empty_pinned(at::IntArrayRef sizes, at::ScalarType type) override;
  bool keeps_memory_of(uint64_t) override { return capture_device_ != cuda::kHost; }
  bool record_stream(const at::Tensor& tensor, cuda::Stream stream) override;
  cuda::HostMemoryOps& host_memory() override { return *emulator_; }
  bool is_pageable(const void* address) override;
  bool reaches(at::Device from, at::Device to) override;
  void run_list_call(const PreparedCall& call) override;
  void copy(const at::Tensor& to, const at::Tensor& from) override;
  void compute(const at::Tensor& into, const at::Tensor& from, const Computation& how) override;

  // Controls for tests. Work of the caller is enqueued on the current stream of the tensor's
  // device; `read` returns a tensor that has the values after `run`.
  const std::shared_ptr<cuda::Emulator>& emulator() const { return emulator_; }
  void use(cuda::Stream stream) { current_.at(stream.device) = stream; }
  void connect(bool on) { connected_ = on; }  // whether devices reach each other's memory
  void write(const at::Tensor& tensor, const at::Tensor& values);
  at::Tensor read(const at::Tensor& tensor);
  void adopt(const at::Tensor& tensor, bool pinned);  // memory of the CPU allocator
  // Returns a tensor of another allocator, which torch's ignores, `offset` bytes into its memory.
  at::Tensor foreign(int64_t count, c10::DeviceIndex device, int64_t offset);
  // `by_torch`: torch keeps memory that it allocates meanwhile on the stream's device.
  void begin_capture(cuda::Stream stream, bool by_torch);
  int end_capture(cuda::Stream stream);
  // Runs the trace in a random order, as issued if the seed is negative, and clears it.
  void run(int64_t seed);
  int recorded() const { return recorded_; }  // number of calls of record_stream
  int blocks_in_use() const;                  // number of tensors' blocks, pinned ones too

 private:
  struct GpuBlock {
    std::size_t bytes;
    cuda::Device device;    // kHost: pinned
    std::size_t stream;     // that it was allocated for
    uint64_t capture;       // whose pool it belongs to; 0: none
    bool in_use = true;     // by a tensor
    bool recorded = false;  // on another stream; such a block is never reused
  };
  uint64_t pool_of(cuda::Stream stream) const;
  at::Tensor tensor_in(cuda::MemoryKind kind, at::IntArrayRef sizes, at::ScalarType type,
                       at::Device device, cuda::Stream stream);
  void enqueue(const char* what, const at::Tensor& tensor, bool writes, std::function<void()> act);

  const std::shared_ptr<cuda::Emulator> emulator_;
  std::vector<cuda::Stream> current_;  // [device]
  std::map<std::byte*, GpuBlock> blocks_;
  std::vector<at::Tensor> adopted_;
  cuda::Device capture_device_ = cuda::kHost;  // on which torch has begun a capture
  int recorded_ = 0;
  bool connected_ = true;
};

}  // namespace pycollect
