// Emulates torch's CUDA runtime on a running emulator: treats CPU tensors as tensors of one device,
// with streams of callers and of groups. A read that comes too early finds poison or data of
// another tensor, and a call that CUDA would reject fails.
#pragma once
#include "../../torch/torch_runtime.h"
#include "emulated_cache.h"

namespace pycollect::dist {

class EmulatedTorch final : public TorchRuntime {
 public:
  // `own_thread`: a thread of the emulator runs the streams' work.
  EmulatedTorch(bool eager, bool own_thread);
  ~EmulatedTorch() override;

  cuda::Api& cuda() override { return *emulator_; }
  bool serves(const at::Tensor& tensor) const override;
  bool has(at::Device device) const override { return device.is_cpu(); }
  int devices() const override { return 1; }
  bool keeps_memory_of(uint64_t) override { return false; }
  at::Device with_index(at::Device) const override { return at::kCPU; }  // there is one device
  cuda::Stream current_stream(at::Device device) override;
  cuda::Stream stream_of(c10::Stream) override { return current_stream(at::kCPU); }
  cuda::Stream new_stream(at::Device device) override;
  void give_back(cuda::Stream) override {}
  void with_streams(c10::ArrayRef<cuda::Stream> streams, c10::function_ref<void()> act) override;
  void complete(c10::ArrayRef<cuda::Stream> streams, c10::function_ref<void()> act) override;
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type, at::Device device) override;
  at::Tensor empty_pinned(at::IntArrayRef sizes, at::ScalarType type) override;
  bool record_stream(const at::Tensor& tensor, cuda::Stream stream) override;
  cuda::HostMemoryOps& host_memory() override { return *emulator_; }
  bool is_pageable(const void*) override { return false; }
  bool reaches(at::Device, at::Device) override { return true; }
  void run_list_call(const PreparedCall& call) override;
  void copy(const at::Tensor& to, const at::Tensor& from) override;
  void compute(const at::Tensor& into, const at::Tensor& from, const Computation& how) override;

  // Controls for tests.
  // A tensor of an allocator that ignores records: its memory is reused as soon as it is freed.
  at::Tensor empty_foreign(int64_t count);
  void put_on_host(const at::Tensor& tensor);               // an ordinary CPU tensor from now on
  void fill_later(const at::Tensor& tensor, double value);  // on the current stream
  void use_second_stream(bool on);  // makes the caller's second stream the current one
  void use_own_stream();            // makes a new stream the calling thread's current one
  void finish_own_stream();         // runs all work on the calling thread's current stream
  void finish_caller();             // runs all work on the caller's first stream
  // Stops the caller's first stream after `after` more items of work, or lets it continue.
  void stall(bool on, int after);
  void capture(bool on);  // begins or ends a capture of the caller's first stream
  int pinned() const { return pinned_->allocations(); }  // number of pinned allocations
  const std::shared_ptr<cuda::Emulator>& emulator() const { return emulator_; }

 private:
  std::size_t number(cuda::Stream stream) const { return emulator_->number(stream); }
  bool is_kept(const at::Tensor& tensor, cuda::Stream stream) const;
  at::Tensor stream_alias(const at::Tensor& tensor) const;
  void enqueue(const char* call, std::initializer_list<at::Tensor> used, std::function<void()> act);

  const std::shared_ptr<cuda::Emulator> emulator_;
  std::recursive_mutex& mutex_;
  const std::shared_ptr<EmulatedCache> cache_, pinned_, foreign_;
  const cuda::Stream caller_, second_;
  cuda::Stream current_;  // of the caller
  std::vector<c10::Storage> on_host_;
  // Storages of other allocators that were recorded on a stream. Weak references: freed storages
  // are dropped.
  std::vector<std::pair<cuda::Stream, c10::weak_intrusive_ptr<c10::StorageImpl>>> kept_;
};

}  // namespace pycollect::dist
