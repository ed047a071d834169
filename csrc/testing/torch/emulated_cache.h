// Emulates torch's caching allocators. The block of a freed tensor is reused by the next tensor of
// its size and stream, at once even if that stream has pending work; but only after the work of
// other streams that were recorded. Blocks are freed with the cache.
#pragma once
#include <map>
#include <vector>

#include "../emulator.h"

namespace pycollect {

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

}  // namespace pycollect
