// Emulates torch's caching allocators. The block of a freed tensor is reused by the next tensor of
// its stream, at once even if that stream has pending work; but only after the work of other
// streams that were recorded. Blocks are freed with the cache, and never cleared.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>

#include "../emulator.h"

namespace pycollect::dist {

class EmulatedCache : public std::enable_shared_from_this<EmulatedCache> {
 public:
  static constexpr std::size_t kNoStream = -1;

  explicit EmulatedCache(std::shared_ptr<cuda::Emulator> emulator)
      : emulator_(std::move(emulator)), streams_(emulator_->streams()) {}

  // `fresh`: fills the block with poison, for memory that the host writes and no stream uses.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type, std::size_t stream, bool fresh);
  // Records that the stream uses the tensor's memory; returns false if the cache does not own it.
  bool record(const at::Tensor& tensor, std::size_t stream);
  bool owns(const at::Tensor& tensor) const;
  int allocations() const { return allocations_; }  // number of calls of `empty`

 private:
  struct CachedBlock {
    std::unique_ptr<std::byte[]> memory;
    std::size_t bytes, stream;
    bool in_use = true;                     // by a tensor
    std::vector<std::size_t> used_on = {};  // other streams recorded while in use
    std::vector<cuda::Point> awaited = {};  // their ends when the tensor was freed
    uint64_t release_number = 0;            // of its last release; the latest is reused first
  };
  void release(std::byte* memory);
  CachedBlock* find(const at::Tensor& tensor) const;

  const std::shared_ptr<cuda::Emulator> emulator_;
  cuda::EmulatedStreams& streams_;  // its mutex guards the members below
  std::map<std::byte*, CachedBlock> blocks_;
  int allocations_ = 0;
  uint64_t releases_ = 0;
};

}  // namespace pycollect::dist
