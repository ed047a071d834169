// See tracts.h. Who opens a tract first says so in its notice and then looks whether it is still
// up; who takes one down does that first and then looks whether somebody has it open: one of the
// two sees the other.
#include "tracts.h"

#include <bit>

#include "../plan/error.h"

namespace pycollect::slabs {
namespace {

// A tract that is used again for less than it has wastes at most as much as is asked for.
constexpr std::size_t kMostTimes = 2;

// Of a place's bits, those of the offset: more than any GPU has bytes.
constexpr int kOffsetBits = 56;
constexpr Place kOffsets = (Place{1} << kOffsetBits) - 1;
constexpr const char* kEnded = "the group whose memory this would be has been destroyed";
constexpr uint64_t bit(int number) { return uint64_t{1} << number; }

}  // namespace

Tracts::Tracts(std::shared_ptr<Gpu> gpu, const shm::Group& group)
    : gpu_(std::move(gpu)),
      deck_(group.deck(), group.world()),
      rank_(group.rank()),
      world_(group.world()),
      segment_(group.segment()) {}

// To be held as long as a notice is looked at.
std::shared_ptr<shm::Segment> Tracts::segment() const {
  const std::lock_guard lock(mutex_);
  if (!segment_) throw std::runtime_error(kEnded);
  return segment_;
}

std::byte* Tracts::add(Device device, std::size_t bytes) {
  if (!origin_.is_here())
    throw std::runtime_error("a forked child of a rank has no GPU memory of its own to allocate");
  const std::size_t size = whole_granules(bytes);
  if (std::byte* const again = reuse(device, size)) return again;
  const auto held = segment();  // the group may end meanwhile
  std::byte* const memory = gpu_->allocate(device, size);
  const int number = put_up(device, memory, size);
  {
    const std::lock_guard lock(mutex_);
    if (!closed_) {
      own_.emplace(memory, Own{device, size, number, true});
      return memory;
    }
  }
  free(device, memory);
  throw std::runtime_error(kEnded);
}

// The smallest that is large enough, and not much larger.
std::byte* Tracts::reuse(Device device, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (closed_) throw std::runtime_error(kEnded);
  auto best = own_.end();
  for (auto it = own_.begin(); it != own_.end(); ++it) {
    const Own& own = it->second;
    if (own.given || own.device != device || own.bytes < bytes || own.bytes > kMostTimes * bytes)
      continue;
    if (best == own_.end() || own.bytes < best->second.bytes) best = it;
  }
  if (best == own_.end()) return nullptr;
  best->second.given = true;
  return best->first;
}

int Tracts::put_up(Device device, std::byte* memory, std::size_t bytes) {
  int number = kNone;
  {
    const std::lock_guard lock(mutex_);
    number = std::countr_one(numbers_);
    if (number == kMostTracts) {
      unreachable_.push_back(text("a rank's GPU memory that others reach is in ", kMostTracts,
                                  " parts already: what comes beyond is copied in collectives"));
      return kNone;
    }
    numbers_ |= bit(number);
  }
  Notice& notice = deck_.notice(rank_, number);
  try {
    notice.handle = gpu_->handle_of(device, memory);
  } catch (const std::runtime_error& error) {
    const std::lock_guard lock(mutex_);
    unreachable_.push_back(text("GPU memory that cannot be handed to other processes is copied in ",
                                "collectives: ", error.what()));
    numbers_ &= ~bit(number);
    return kNone;
  }
  notice.bytes.store(bytes, std::memory_order_seq_cst);
  return number;
}

std::vector<std::string> Tracts::unreachable() {
  const std::lock_guard lock(mutex_);
  return std::exchange(unreachable_, {});
}

// False: somebody has it open.
bool Tracts::take_down(int number) {
  Notice& notice = deck_.notice(rank_, number);
  const std::size_t bytes = notice.bytes.exchange(0, std::memory_order_seq_cst);
  if (notice.openers.load(std::memory_order_seq_cst) != 0) {
    notice.bytes.store(bytes, std::memory_order_seq_cst);
    return false;
  }
  numbers_ &= ~bit(number);
  return true;
}

void Tracts::give_back(std::byte* memory) noexcept {
  if (!origin_.is_here()) return;  // it is the parent's
  Device device = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto found = own_.find(memory);
    if (found == own_.end()) return;
    found->second.given = false;
    if (found->second.number != kNone && !take_down(found->second.number)) return;
    device = found->second.device;
    own_.erase(found);
  }
  free(device, memory);
}

void Tracts::free(Device device, std::byte* memory) const noexcept {
  try {
    gpu_->free(device, memory);
  } catch (...) {  // the device is broken, and its memory is gone with it
  }
}

std::optional<Place> Tracts::place_of(const std::byte* at, std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  auto after = own_.upper_bound(const_cast<std::byte*>(at));
  if (after == own_.begin()) return {};
  const auto& [base, own] = *--after;
  const auto offset = static_cast<std::size_t>(at - base);
  if (own.number == kNone || offset + bytes > own.bytes) return {};
  return Place(own.number) << kOffsetBits | offset;
}

std::byte* Tracts::at(Device device, Rank owner, Place place) {
  const auto number = static_cast<int>(place >> kOffsetBits);
  const std::size_t offset = place & kOffsets;
  const auto held = segment();
  if (number >= kMostTracts || offset >= deck_.notice(owner, number).bytes.load())
    throw std::runtime_error(text("rank ", owner, " has no memory at the place that it names"));
  return open(device, owner, number) + offset;
}

std::byte* Tracts::open(Device device, Rank owner, int number) {
  const std::lock_guard lock(opening_);
  if (let_go_) throw std::runtime_error("the group has been destroyed");
  std::byte*& found = opened_[{device, owner, number}];
  if (found != nullptr) return found;
  Notice& notice = deck_.notice(owner, number);
  const uint64_t before = notice.openers.fetch_or(bit(rank_), std::memory_order_seq_cst);
  try {
    if (notice.bytes.load(std::memory_order_seq_cst) == 0)
      throw std::runtime_error(text("rank ", owner, " has given its memory back"));
    found = gpu_->open(device, notice.handle);
  } catch (...) {  // it may be open on another device
    if ((before & bit(rank_)) == 0) notice.openers.fetch_and(~bit(rank_));
    opened_.erase({device, owner, number});
    throw;
  }
  return found;
}

void Tracts::close_others() {
  const std::lock_guard lock(opening_);
  let_go_ = true;
  for (const auto& [key, memory] : opened_) {
    try {
      gpu_->close(key.device, memory);
    } catch (...) {  // the device is broken
    }
    deck_.notice(key.owner, key.number).openers.fetch_and(~bit(rank_));
  }
  opened_.clear();
}

// Tensors may outlive their group, and no other memory of the group's does. Who has a tract open
// keeps its memory.
void Tracts::close() {
  std::shared_ptr<shm::Segment> held;  // until the end, without the lock: unmapping takes time
  std::map<std::byte*, Device> idle;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    held.swap(segment_);
    for (auto& [memory, own] : own_) {
      if (own.number != kNone) deck_.notice(rank_, own.number).bytes.store(0);
      own.number = kNone;
      if (!own.given) idle.emplace(memory, own.device);
    }
    for (const auto& [memory, device] : idle) own_.erase(memory);
  }
  close_others();
  for (const auto& [memory, device] : idle) free(device, memory);
}

Tracts::Use Tracts::use() const {
  const std::lock_guard lock(mutex_);
  Use all = {};
  for (const auto& [memory, own] : own_) (own.given ? all.used : all.kept) += own.bytes;
  return all;
}

}  // namespace pycollect::slabs
