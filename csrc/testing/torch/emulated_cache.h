// Memory for tensors as torch's caching allocators give it out: a block whose tensor has gone is
// its stream's next tensor's at once, wherever that stream is, and waits only for the other streams
// that it was recorded on. Nothing goes back before the end, and nothing is cleared.
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

  // Poison, if nobody has to do with the block any more (`fresh`): of memory that the host fills.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type, std::size_t stream, bool fresh);
  // From then on the stream has to do with the tensor's memory; false: it is none of this cache's.
  bool record(const at::Tensor& tensor, std::size_t stream);
  bool owns(const at::Tensor& tensor) const;
  int made() const { return made_; }  // how often there was memory asked for

 private:
  struct Block {
    std::unique_ptr<std::byte[]> memory;
    std::size_t bytes, stream;
    bool given = true;
    std::vector<std::size_t> used_on = {};  // streams, while it is given
    std::vector<cuda::Point> awaited = {};  // ... and where they were when it came back
    uint64_t returned = 0;
  };
  void give_back(std::byte* memory);
  Block* find(const at::Tensor& tensor) const;

  const std::shared_ptr<cuda::Emulator> emulator_;
  cuda::EmulatedStreams& streams_;  // under whose mutex all of this is
  std::map<std::byte*, Block> blocks_;
  int made_ = 0;
  uint64_t returns_ = 0;
};

}  // namespace pycollect::dist
