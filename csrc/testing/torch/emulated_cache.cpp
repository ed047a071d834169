// See emulated_cache.h.
#include "emulated_cache.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>

namespace pycollect::dist {
namespace {

constexpr std::size_t kUnit = 512;  // bytes; torch rounds sizes up to a multiple

}  // namespace

at::Tensor EmulatedCache::empty(at::IntArrayRef sizes, at::ScalarType type, std::size_t stream,
                                bool fresh) {
  const cuda::EmulatedStreams::Lock lock(streams_.mutex);
  ++allocations_;
  const auto count = static_cast<std::size_t>(c10::multiply_integers(sizes));
  const std::size_t bytes =
      std::max<std::size_t>((count * at::elementSize(type) + kUnit - 1) / kUnit, 1) * kUnit;
  std::byte* best = nullptr;
  for (auto& [memory, block] : blocks_) {
    if (block.in_use || block.bytes != bytes || block.stream != stream) continue;
    std::erase_if(block.awaited, [&](cuda::Point p) { return streams_.passed(p); });
    if (!block.awaited.empty()) continue;
    if (best == nullptr || blocks_.at(best).release_number < block.release_number) best = memory;
  }
  if (best == nullptr) {
    auto memory = std::make_unique<std::byte[]>(bytes);
    best = memory.get();
    std::memset(best, cuda::kPoison, bytes);
    blocks_.emplace(best, CachedBlock{std::move(memory), bytes, stream});
  }
  if (fresh) std::memset(best, cuda::kPoison, bytes);
  blocks_.at(best).in_use = true;
  return at::from_blob(
      best, sizes, [cache = shared_from_this(), best](void*) { cache->release(best); },
      at::TensorOptions(type));
}

void EmulatedCache::release(std::byte* memory) {
  const cuda::EmulatedStreams::Lock lock(streams_.mutex);
  CachedBlock& block = blocks_.at(memory);
  block.in_use = false;
  block.release_number = ++releases_;
  for (std::size_t stream : block.used_on) block.awaited.push_back(streams_.end(stream));
  block.used_on.clear();
}

EmulatedCache::CachedBlock* EmulatedCache::find(const at::Tensor& tensor) const {
  const auto* const at = static_cast<const std::byte*>(tensor.storage().data());
  const auto found = blocks_.find(const_cast<std::byte*>(at));
  return found == blocks_.end() ? nullptr : const_cast<CachedBlock*>(&found->second);
}

bool EmulatedCache::owns(const at::Tensor& tensor) const {
  const cuda::EmulatedStreams::Lock lock(streams_.mutex);
  return find(tensor) != nullptr;
}

bool EmulatedCache::record(const at::Tensor& tensor, std::size_t stream) {
  const cuda::EmulatedStreams::Lock lock(streams_.mutex);
  CachedBlock* const block = find(tensor);
  if (block == nullptr) return false;
  if (stream != block->stream &&
      std::find(block->used_on.begin(), block->used_on.end(), stream) == block->used_on.end())
    block->used_on.push_back(stream);
  return true;
}

}  // namespace pycollect::dist
