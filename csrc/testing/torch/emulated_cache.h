// Emulates torch's caching allocators: a block whose tensor is freed is reused at once by the next
// tensor of its stream, whatever that stream still has to run, and waits only for the other streams
// on which it was recorded. No block is returned to the system before the end, and none is cleared.
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

  // `fresh`: fills the block with poison. For memory that the host fills, when no stream uses it.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type, std::size_t stream, bool fresh);
  // Records that the stream uses the tensor's memory; returns false for memory of another owner.
  bool record(const at::Tensor& tensor, std::size_t stream);
  bool owns(const at::Tensor& tensor) const;
  int made() const { return made_; }  // number of calls of `empty`

 private:
  struct CachedBlock {
    std::unique_ptr<std::byte[]> memory;
    std::size_t bytes, stream;
    bool given = true;                      // a tensor has it
    std::vector<std::size_t> used_on = {};  // recorded streams, while a tensor has the block
    std::vector<cuda::Point> awaited = {};  // ends of those streams when the tensor was freed
    uint64_t returned = 0;                  // number of the release; the latest is reused first
  };
  void give_back(std::byte* memory);
  CachedBlock* find(const at::Tensor& tensor) const;

  const std::shared_ptr<cuda::Emulator> emulator_;
  cuda::EmulatedStreams& streams_;  // its mutex guards the members below
  std::map<std::byte*, CachedBlock> blocks_;
  int made_ = 0;
  uint64_t returns_ = 0;
};

}  // namespace pycollect::dist
