// See symmetric_memory.h. A rank that opens a segment first sets its bit in the export entry, then
// checks that the entry is still published. An owner first withdraws the entry, then checks that no
// peer has the segment open. So at least one of the two detects the other.
#include "symmetric_memory.h"

#include <bit>

#include "../plan/error.h"

namespace pycollect::cuda_ipc {
namespace {

// A reused segment is at most this many times the requested size, so it wastes at most that size.
constexpr std::size_t kMaxSizeRatio = 2;

// Bits of a RemoteOffset that hold the offset in the segment: enough for the memory of any GPU.
constexpr int kOffsetBits = 56;
constexpr RemoteOffset kOffsetMask = (RemoteOffset{1} << kOffsetBits) - 1;
constexpr const char* kGroupDestroyed = "no symmetric GPU memory: its group has been destroyed";
constexpr uint64_t bit(int number) { return uint64_t{1} << number; }

}  // namespace

SymmetricMemory::SymmetricMemory(std::shared_ptr<CudaIpcMemory> gpu, const ipc::Group& group)
    : gpu_(std::move(gpu)),
      signal_pad_(group.signal_pad(), group.world()),
      rank_(group.rank()),
      world_(group.world()),
      segment_(group.segment()) {}

// Returns the shared memory, to be held while an export entry is accessed.
std::shared_ptr<ipc::Segment> SymmetricMemory::segment() const {
  const std::lock_guard lock(mutex_);
  if (!segment_) throw std::runtime_error(kGroupDestroyed);
  return segment_;
}

std::byte* SymmetricMemory::add(Device device, std::size_t bytes) {
  if (fork_guard_.forked())
    throw std::runtime_error("a forked child of a rank cannot allocate symmetric GPU memory");
  const std::size_t size = whole_granules(bytes);
  if (std::byte* const reused = reuse(device, size)) return reused;
  const auto held = segment();  // keeps the export entries mapped if the group ends meanwhile
  std::byte* const memory = gpu_->allocate(device, size);
  const int number = publish(device, memory, size);
  {
    const std::lock_guard lock(mutex_);
    if (!closed_) {
      own_.emplace(memory, OwnSegment{device, size, number, true});
      return memory;
    }
  }
  free(device, memory);
  throw std::runtime_error(kGroupDestroyed);
}

// Returns the smallest free segment that is large enough and not much larger, or nullptr.
std::byte* SymmetricMemory::reuse(Device device, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (closed_) throw std::runtime_error(kGroupDestroyed);
  auto best = own_.end();
  for (auto it = own_.begin(); it != own_.end(); ++it) {
    const OwnSegment& own = it->second;
    if (own.in_use || own.device != device || own.bytes < bytes ||
        own.bytes > kMaxSizeRatio * bytes)
      continue;
    if (best == own_.end() || own.bytes < best->second.bytes) best = it;
  }
  if (best == own_.end()) return nullptr;
  best->second.in_use = true;
  return best->first;
}

int SymmetricMemory::publish(Device device, std::byte* memory, std::size_t bytes) {
  int number = kNone;
  {
    const std::lock_guard lock(mutex_);
    number = std::countr_one(used_entries_);
    if (number == kMaxExports) {
      unreachable_.push_back(text("this rank's symmetric GPU memory already has ", kMaxExports,
                                  " segments, the maximum: further tensors are copied in ",
                                  "collectives"));
      return kNone;
    }
    used_entries_ |= bit(number);
  }
  ExportEntry& export_entry = signal_pad_.export_entry(rank_, number);
  try {
    export_entry.handle = gpu_->handle_of(device, memory);
  } catch (const std::runtime_error& error) {
    const std::lock_guard lock(mutex_);
    unreachable_.push_back(text("GPU memory that cannot be exported to other processes is copied ",
                                "in collectives: ", error.what()));
    used_entries_ &= ~bit(number);
    return kNone;
  }
  export_entry.bytes.store(bytes, std::memory_order_seq_cst);
  return number;
}

std::vector<std::string> SymmetricMemory::unreachable() {
  const std::lock_guard lock(mutex_);
  return std::exchange(unreachable_, {});
}

// Withdraws an export entry; returns false if a peer has the segment open.
bool SymmetricMemory::unpublish(int number) {
  ExportEntry& export_entry = signal_pad_.export_entry(rank_, number);
  const std::size_t bytes = export_entry.bytes.exchange(0, std::memory_order_seq_cst);
  if (export_entry.openers.load(std::memory_order_seq_cst) != 0) {
    export_entry.bytes.store(bytes, std::memory_order_seq_cst);
    return false;
  }
  used_entries_ &= ~bit(number);
  return true;
}

void SymmetricMemory::give_back(std::byte* memory) noexcept {
  if (fork_guard_.forked()) return;  // in a forked child the memory belongs to the parent
  Device device = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto found = own_.find(memory);
    if (found == own_.end()) return;
    found->second.in_use = false;
    if (found->second.number != kNone && !unpublish(found->second.number)) return;
    device = found->second.device;
    own_.erase(found);
  }
  free(device, memory);
}

void SymmetricMemory::free(Device device, std::byte* memory) const noexcept {
  try {
    gpu_->free(device, memory);
  } catch (...) {  // the device is broken, and its memory is gone with it
  }
}

std::optional<RemoteOffset> SymmetricMemory::offset_of(const std::byte* at,
                                                       std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  auto after = own_.upper_bound(const_cast<std::byte*>(at));
  if (after == own_.begin()) return {};
  const auto& [base, own] = *--after;
  const auto offset = static_cast<std::size_t>(at - base);
  if (own.number == kNone || offset + bytes > own.bytes) return {};
  return RemoteOffset(own.number) << kOffsetBits | offset;
}

std::byte* SymmetricMemory::at(Device device, Rank owner, RemoteOffset offset) {
  const auto number = static_cast<int>(offset >> kOffsetBits);
  const std::size_t in_segment = offset & kOffsetMask;
  const auto held = segment();
  if (number >= kMaxExports || in_segment >= signal_pad_.export_entry(owner, number).bytes.load())
    throw std::runtime_error(text("rank ", owner, " published an offset outside its memory"));
  return open(device, owner, number) + in_segment;
}

std::byte* SymmetricMemory::open(Device device, Rank owner, int number) {
  const std::lock_guard lock(open_mutex_);
  if (closed_to_peers_) throw std::runtime_error("the group has been destroyed");
  std::byte*& found = opened_[{device, owner, number}];
  if (found != nullptr) return found;
  ExportEntry& export_entry = signal_pad_.export_entry(owner, number);
  const uint64_t before = export_entry.openers.fetch_or(bit(rank_), std::memory_order_seq_cst);
  try {
    if (export_entry.bytes.load(std::memory_order_seq_cst) == 0)
      throw std::runtime_error(text("rank ", owner, " has withdrawn its GPU memory"));
    found = gpu_->open(device, export_entry.handle);
  } catch (...) {  // the bit stays if the segment is open on another device
    if ((before & bit(rank_)) == 0) export_entry.openers.fetch_and(~bit(rank_));
    opened_.erase({device, owner, number});
    throw;
  }
  return found;
}

void SymmetricMemory::abandon_peer_segments() {
  const std::lock_guard lock(open_mutex_);
  closed_to_peers_ = true;
  opened_.clear();
}

void SymmetricMemory::close_peer_segments() {
  const std::lock_guard lock(open_mutex_);
  closed_to_peers_ = true;
  for (const auto& [key, memory] : opened_) {
    try {
      gpu_->close(key.device, memory);
    } catch (...) {  // the device is broken
    }
    signal_pad_.export_entry(key.owner, key.number).openers.fetch_and(~bit(rank_));
  }
  opened_.clear();
}

// Tensors may outlive their group; no other memory of the group does. A peer that has a segment
// open keeps its memory.
void SymmetricMemory::close() {
  std::shared_ptr<ipc::Segment> held;  // released at the end without the lock: unmapping is slow
  std::map<std::byte*, Device> idle;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    held.swap(segment_);
    for (auto& [memory, own] : own_) {
      if (own.number != kNone) signal_pad_.export_entry(rank_, own.number).bytes.store(0);
      own.number = kNone;
      if (!own.in_use) idle.emplace(memory, own.device);
    }
    for (const auto& [memory, device] : idle) own_.erase(memory);
  }
  close_peer_segments();
  for (const auto& [memory, device] : idle) free(device, memory);
}

SymmetricMemory::SymmetricUsage SymmetricMemory::usage() const {
  const std::lock_guard lock(mutex_);
  SymmetricUsage all = {};
  for (const auto& [memory, own] : own_) (own.in_use ? all.used : all.cached) += own.bytes;
  return all;
}

}  // namespace pycollect::cuda_ipc
