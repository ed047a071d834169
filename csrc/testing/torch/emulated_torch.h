// Emulates torch's CUDA runtime on the emulator, for two kinds of tensors. Tensors of torch's
// device type PrivateUse1 lie in the emulator's memory; calls on lists take them. Process groups
// take CPU tensors instead, which stand for tensors of one device. A read that comes too early
// finds poison or data of another tensor, and a call that CUDA would reject fails.
#pragma once
#include <map>
#include <vector>

#include "../../torch/gpu_calls.h"
#include "../emulator.h"

namespace pycollect {

// Emulates torch's caching allocators. The block of a freed tensor is reused by the next tensor of
// its size and stream, at once even if that stream has pending work; but only after the work of
// other streams that were recorded. Blocks are freed with the cache.
class EmulatedCache : public std::enable_shared_from_this<EmulatedCache> {
 public:
  // What a block is for: the other requests that may reuse it.
  struct Use {
    std::size_t bytes;
    cuda::Device device;   // kHost: pinned
    std::size_t stream;    // kNoStream for pinned memory
    uint64_t capture = 0;  // whose pool it belongs to; 0: none
    bool foreign = false;  // of an allocator that ignores records of streams
    bool operator==(const Use&) const = default;
  };
  static constexpr std::size_t kNoStream = -1;

  explicit EmulatedCache(std::shared_ptr<cuda::Emulator> emulator)
      : emulator_(std::move(emulator)) {}

  // The caller of all functions but `release` must hold the mutex of the emulator's streams.
  std::byte* take(Use use);  // the size is rounded up as by torch
  void release(std::byte* memory);
  bool owns(const void* address) const { return find(address) != nullptr; }
  bool is_pinned(const void* address) const;
  // Records that the stream uses the memory. Returns false if that has no effect.
  bool record(const void* address, std::size_t stream);
  int in_use() const;

 private:
  struct Awaited {
    cuda::Point point;
    int logged;  // its number in the emulator's log
  };
  struct CachedBlock {
    Use use;
    bool in_use = true;                     // by a tensor
    std::vector<std::size_t> used_on = {};  // other streams recorded while in use
    std::vector<Awaited> awaited = {};      // their ends when the tensor was freed
    uint64_t release_number = 0;            // of its last release; the latest is reused first
  };
  CachedBlock* find(const void* address) const;
  bool is_free(const CachedBlock& block) const;

  const std::shared_ptr<cuda::Emulator> emulator_;
  std::map<std::byte*, CachedBlock> blocks_;
  uint64_t releases_ = 0;
};

class EmulatedTorch final : public TorchRuntime {
 public:
  static constexpr c10::DeviceType kLists = c10::DeviceType::PrivateUse1;
  // `kind`: kLists, or CPU for tensors that stand for those of a device.
  EmulatedTorch(c10::DeviceType kind, int devices);
  ~EmulatedTorch() override;

  cuda::Api& cuda() override { return *emulator_; }
  bool serves(const at::Tensor& tensor) const override;
  bool has(at::Device device) const override { return device.type() == kind_; }
  int devices() const override { return static_cast<int>(current_.size()); }
  at::Device with_index(at::Device device) const override;
  cuda::Stream current_stream(at::Device device) override;
  cuda::Stream stream_of(c10::Stream stream) override;
  cuda::Stream new_stream(at::Device device) override;
  void give_back(cuda::Stream stream) override;
  void with_streams(c10::ArrayRef<cuda::Stream> streams, c10::function_ref<void()> act) override;
  void complete(c10::ArrayRef<cuda::Stream> streams, c10::function_ref<void()> act) override;
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type, at::Device device) override;
  at::Tensor empty_pinned(at::IntArrayRef sizes, at::ScalarType type) override;
  bool keeps_memory_of(uint64_t) override { return capture_device_ != cuda::kHost; }
  bool record_stream(const at::Tensor& tensor, cuda::Stream stream) override;
  cuda::HostMemoryOps& host_memory() override { return *emulator_; }
  bool is_pageable(const void* address) override;
  bool reaches(at::Device from, at::Device to) override { return connected_ || from == to; }
  void run_list_call(const ListCall& call) override;
  void copy(const at::Tensor& to, const at::Tensor& from) override;
  void compute(const at::Tensor& into, const at::Tensor& from, const Computation& how) override;

  // Controls for tests. Work of the caller is enqueued on a stream; a tensor that `read` returns
  // has the values when that stream is done. Without a stream, on the current one of the tensor's
  // device, or done at once by the host if the tensor is in host memory.
  const std::shared_ptr<cuda::Emulator>& emulator() const { return emulator_; }
  using StreamOrNone = std::optional<cuda::Stream>;
  void write(const at::Tensor& tensor, const at::Tensor& values, StreamOrNone stream = {});
  at::Tensor read(const at::Tensor& tensor, StreamOrNone stream = {});
  // A tensor of an allocator that ignores records, `offset` bytes into its memory.
  at::Tensor empty_foreign(int64_t count, c10::DeviceIndex device, int64_t offset);
  void adopt(const at::Tensor& tensor, bool pinned);  // memory of the CPU allocator
  void put_on_host(const at::Tensor& tensor);         // a CPU tensor that stands for nothing
  void connect(bool on);                              // whether devices reach each other's memory
  void use(cuda::Stream stream);                      // makes it the current one of its device
  void use_own_stream();  // makes a new stream the calling thread's current one
  void finish();          // waits for all work on the calling thread's current stream
  // `by_torch`: torch keeps memory that it allocates meanwhile on the stream's device.
  void begin_capture(cuda::Stream stream, bool by_torch);
  int end_capture(cuda::Stream stream);
  void stall(cuda::Stream stream);  // stops it until `resume` is called
  void resume();
  void run(int64_t seed);  // runs all work in a random order, and begins a new log
  int recorded() const { return recorded_; }  // number of calls of record_stream
  int blocks_in_use() const;                  // number of tensors' blocks, pinned ones too

 private:
  using Lock = cuda::EmulatedStreams::Lock;
  cuda::Device index_of(at::Device device) const { return has_index() ? device.index() : 0; }
  bool has_index() const { return kind_ != c10::DeviceType::CPU; }
  std::size_t number(cuda::Stream stream) const { return emulator_->number(stream); }
  uint64_t pool_of(cuda::Stream stream) const;
  at::Tensor tensor_in(EmulatedCache::Use use, at::IntArrayRef sizes, at::ScalarType type,
                       at::Device device, int64_t offset = 0);
  bool is_kept(const at::Tensor& tensor, cuda::Stream stream) const;
  at::Tensor host_view(const at::Tensor& tensor) const;
  std::vector<MemoryAccess> accesses(std::initializer_list<at::Tensor> used) const;
  void caller_work(const at::Tensor& on, StreamOrNone stream, const char* what,
                   std::vector<MemoryAccess> accesses, std::function<void()> act);
  void enqueue(const char* call, std::initializer_list<at::Tensor> used, std::function<void()> act);

  const c10::DeviceType kind_;
  const uint64_t number_;  // of the runtime: another one may get its address later
  const std::shared_ptr<cuda::Emulator> emulator_;
  const std::shared_ptr<EmulatedCache>
      cache_;  // guarded by the mutex of the emulator's streams, as the members below
  std::vector<cuda::Stream> current_;  // [device], of the callers
  std::vector<cuda::Stream> idle_;     // given back; their work may be pending
  std::vector<at::Tensor> adopted_;
  std::vector<c10::Storage> on_host_;
  // Storages of the CPU allocator that were recorded on a stream. Weak references: freed storages
  // are dropped.
  std::vector<std::pair<cuda::Stream, c10::weak_intrusive_ptr<c10::StorageImpl>>> kept_;
  cuda::Device capture_device_ = cuda::kHost;  // on which torch has begun a capture
  int recorded_ = 0;
  bool connected_ = true;
  std::shared_ptr<GpuCalls> list_calls_;  // on the device that CPU tensors stand for
};

}  // namespace pycollect
