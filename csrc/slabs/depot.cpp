// See depot.h.
#include "depot.h"

namespace pycollect::slabs {
namespace {

// Blocks begin and end at lines of whatever cache or page a copy likes best.
constexpr std::size_t kUnit = 4096;

constexpr std::size_t whole_units(std::size_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; }

}  // namespace

// Where the first gap of so many bytes begins.
std::optional<std::size_t> Depot::gap(const Held& held, std::size_t bytes, std::size_t limit) {
  std::size_t at = 0;
  for (const auto& [offset, taken] : held.taken) {
    if (offset - at >= bytes) break;
    at = offset + taken;
  }
  return at + bytes <= limit ? std::optional(at) : std::nullopt;
}

std::optional<Depot::Block> Depot::take_from(Held& held, std::size_t bytes) {
  const auto at = gap(held, bytes, tract_bytes_);
  if (!at) return {};
  const auto place = tracts_->place_of(held.memory + *at, bytes);
  if (!place) return {};  // it cannot be handed over, which Tracts has said
  held.taken.emplace(*at, bytes);
  return Block{held.memory + *at, *place};
}

std::optional<Depot::Block> Depot::take(Device device, std::size_t bytes) {
  const std::size_t size = whole_units(bytes);
  if (size > tract_bytes_) return {};
  const std::lock_guard lock(mutex_);
  for (Held& held : held_)
    if (held.device == device)
      if (const auto block = take_from(held, size)) return block;
  return grow(device) ? take_from(held_.back(), size) : std::nullopt;
}

// Once it fails it is not tried again: to ask for memory takes long, and every message would.
bool Depot::grow(Device device) {
  if (!grows_ || held_.size() == kMostTracts) return false;
  grows_ = false;
  try {
    std::byte* const memory = tracts_->add(device, tract_bytes_);
    grows_ = tracts_->place_of(memory, tract_bytes_).has_value();
    if (grows_)
      held_.push_back({memory, device});
    else
      tracts_->give_back(memory);
  } catch (const std::runtime_error&) {  // of which there are other ways than this
  }
  return grows_;
}

void Depot::give_back(const Block& block) noexcept {
  const std::lock_guard lock(mutex_);
  for (Held& held : held_)
    if (block.memory >= held.memory && block.memory < held.memory + tract_bytes_)
      held.taken.erase(static_cast<std::size_t>(block.memory - held.memory));
}

void Depot::close() noexcept {
  const std::lock_guard lock(mutex_);
  grows_ = false;
  for (const Held& held : held_)
    if (held.taken.empty()) tracts_->give_back(held.memory);
  held_.clear();
}

}  // namespace pycollect::slabs
