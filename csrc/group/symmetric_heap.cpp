#include "symmetric_heap.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <iterator>

#include "../plan/error.h"
#include "group.h"

namespace pycollect::ipc {
namespace {

// The most that a heap commits beyond a block: takes about 30 ms.
constexpr std::size_t kMostGrowth = 64 << 20;
// Without these offsets, large blocks of equal sizes, and the blocks of different ranks, would fall
// on the same cache sets; copies between such blocks are a third slower.
constexpr std::size_t kLargeBlock = 32 << 10, kBlockStagger = 5 * SymmetricHeap::kAlignment;
constexpr std::size_t kRankStagger = 3 * SegmentLayout::kPage + kBlockStagger;
// Address space for the heaps of all ranks of a group. A process has 128 TiB, and can be in tens of
// groups.
constexpr std::size_t kMostAddressSpace = std::size_t{4} << 40;
// A group reserves at most this fraction (1 / 8) of a limited address space (ulimit -v).
constexpr int kShareOfLimit = 8;

std::size_t rounded(std::size_t bytes) {
  const std::size_t least =
      std::max(bytes, std::size_t{1}) + (bytes >= kLargeBlock) * kBlockStagger;
  return (least + SymmetricHeap::kAlignment - 1) / SymmetricHeap::kAlignment *
         SymmetricHeap::kAlignment;
}

}  // namespace

std::size_t SymmetricHeap::default_bytes(int world) {
  const std::size_t memory = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) *
                             static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  std::size_t all = kMostAddressSpace;
  rlimit limit = {};
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    all = std::min<std::size_t>(all, limit.rlim_cur / kShareOfLimit);
  return std::min(std::bit_ceil(memory), all / world) / SegmentLayout::kPage * SegmentLayout::kPage;
}

SymmetricHeap::SymmetricHeap(const Group& group)
    : segment_(group.segment()),
      abort_state_(reinterpret_cast<Control*>(segment_->data())->record, group.settings().name),
      begin_(group.layout().heap(group.rank())),
      bytes_(group.layout().sizes.symmetric_heap_bytes) {
  const std::size_t first = std::min(group.rank() * kRankStagger, bytes_);
  add_gap(first, bytes_ - first);
}

void SymmetricHeap::add_gap(std::size_t offset, std::size_t bytes) {
  areas_[offset] = {bytes, true};
  by_size_.emplace(bytes, offset);
}

// Allocates from the beginning of the smallest gap that is large enough. The part of the heap that
// was never used is mostly the largest, and so the last to be taken from.
std::size_t SymmetricHeap::allocate(std::size_t bytes) {
  if (fork_guard_.forked())
    throw std::runtime_error(
        "a forked child of a rank cannot allocate shared memory; create another group in it");
  const std::lock_guard lock(mutex_);
  ++calls_;
  if (abort_state_.is_aborted()) abort_state_.rethrow({"allocate_tensor", calls_, Deadline()});
  if (bytes > bytes_ || rounded(bytes) > bytes_)
    throw std::runtime_error(text("a tensor of ", bytes,
                                  " bytes does not fit into a symmetric heap of ", bytes_,
                                  " bytes; raise symmetric_heap_bytes"));
  const std::size_t size = rounded(bytes);
  const auto best = by_size_.lower_bound({size, 0});
  if (best == by_size_.end())
    throw std::runtime_error(text("no place for ", size, " bytes in this rank's symmetric heap: ",
                                  used_, " of ", bytes_, " bytes are in use by tensors"));
  const auto [gap, offset] = *best;
  commit(offset + size);
  by_size_.erase(best);
  areas_[offset] = {size, false};
  if (gap > size) add_gap(offset + size, gap - size);
  used_ += size;
  return offset;
}

// Commits memory up to there, and at least as much again as the heap has, up to kMostGrowth: a
// small heap grows little, and a large one rarely.
void SymmetricHeap::commit(std::size_t end) {
  if (end <= committed_) return;
  const auto up_to = [&](std::size_t last) {
    last = std::min((last + kGranule - 1) / kGranule * kGranule, bytes_);
    segment_->commit(begin_ + committed_, last - committed_);
    committed_ = last;
  };
  const std::size_t grown = committed_ + std::min(committed_, kMostGrowth);
  try {
    up_to(std::max(end, grown));
  } catch (const std::runtime_error&) {
    if (grown <= end) throw;
    up_to(end);  // memory may suffice for this block
  }
}

void SymmetricHeap::free(std::size_t offset) noexcept {
  if (fork_guard_.forked() || abort_state_.is_aborted()) return;
  const std::lock_guard lock(mutex_);
  auto first = areas_.find(offset);
  if (first == areas_.end() || first->second.is_free) return;
  used_ -= first->second.bytes;
  // Adjacent gaps become one.
  auto behind = std::next(first);
  if (behind != areas_.end() && behind->second.is_free) ++behind;
  if (first != areas_.begin() && std::prev(first)->second.is_free) --first;
  std::size_t bytes = 0;
  for (auto area = first; area != behind; ++area) {
    if (area->second.is_free) by_size_.erase({area->second.bytes, area->first});
    bytes += area->second.bytes;
  }
  offset = first->first;
  areas_.erase(first, behind);
  add_gap(offset, bytes);
}

SymmetricHeap::HeapUsage SymmetricHeap::usage() const {
  const std::lock_guard lock(mutex_);
  return {used_, committed_ - used_, bytes_};
}

}  // namespace pycollect::ipc
