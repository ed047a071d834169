// See emulated_cache.h.
#include "emulated_cache.h"

#include <algorithm>
#include <cstring>

namespace pycollect {
namespace {

constexpr std::size_t kUnit = 512;  // bytes; torch rounds sizes up to a multiple

}  // namespace

// Pinned memory gets new content, because the host writes it before any stream uses it.
std::byte* EmulatedCache::take(Use use) {
  use.bytes = std::max<std::size_t>((use.bytes + kUnit - 1) / kUnit, 1) * kUnit;
  std::byte* best = nullptr;
  for (auto& [memory, block] : blocks_)
    if (block.use == use && is_free(block) &&
        (best == nullptr || blocks_.at(best).release_number < block.release_number))
      best = memory;
  if (best == nullptr) {
    const bool pinned = use.device == cuda::kHost;
    best = emulator_->allocate(pinned ? cuda::MemoryKind::pinned : cuda::MemoryKind::device,
                               use.device, use.bytes);
    blocks_.emplace(best, CachedBlock{use});
  }
  CachedBlock& block = blocks_.at(best);
  for (const Awaited& a : std::exchange(block.awaited, {})) emulator_->log_passed(a.logged);
  if (use.device == cuda::kHost)
    emulator_->host_work("new content of pinned memory", {{best, use.bytes, true, 0}},
                         [&] { std::memset(best, cuda::kPoison, use.bytes); });
  block.in_use = true;
  return best;
}

// Torch's allocators ask events which work is done.
bool EmulatedCache::is_free(const CachedBlock& block) const {
  return !block.in_use &&
         std::all_of(block.awaited.begin(), block.awaited.end(),
                     [&](const Awaited& a) { return emulator_->streams().passed(a.point); });
}

void EmulatedCache::release(std::byte* memory) {
  const auto lock = emulator_->locked();
  CachedBlock& block = blocks_.at(memory);
  block.in_use = false;
  block.release_number = ++releases_;
  for (std::size_t stream : block.used_on)
    block.awaited.push_back({emulator_->streams().end(stream), emulator_->log_point(stream)});
  block.used_on.clear();
}

EmulatedCache::CachedBlock* EmulatedCache::find(const void* address) const {
  auto* const at = static_cast<std::byte*>(const_cast<void*>(address));
  const auto after = blocks_.upper_bound(at);
  if (after == blocks_.begin()) return nullptr;
  const auto& [memory, block] = *std::prev(after);
  return at < memory + block.use.bytes ? const_cast<CachedBlock*>(&block) : nullptr;
}

bool EmulatedCache::is_pinned(const void* address) const {
  const CachedBlock* const block = find(address);
  return block != nullptr && block->use.device == cuda::kHost;
}

bool EmulatedCache::record(const void* address, std::size_t stream) {
  CachedBlock* const block = find(address);
  if (block == nullptr || block->use.foreign) return false;
  auto& used = block->used_on;
  if (stream != block->use.stream && std::find(used.begin(), used.end(), stream) == used.end())
    used.push_back(stream);
  return true;
}

int EmulatedCache::in_use() const {
  return static_cast<int>(std::count_if(blocks_.begin(), blocks_.end(),
                                        [](const auto& entry) { return entry.second.in_use; }));
}

}  // namespace pycollect
