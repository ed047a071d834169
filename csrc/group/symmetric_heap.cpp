#include "symmetric_heap.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <optional>

#include "../plan/error.h"
#include "group.h"

namespace pycollect::ipc {
namespace {

constexpr std::size_t kMiB = 1 << 20;
// How much memory a heap commits at once: little while the heap is small; the maximum takes about
// 30 ms.
constexpr std::size_t kLeastGrowth = 1 * kMiB, kMostGrowth = 64 * kMiB;
// Free memory that exceeds the memory in use by more than this is returned to the kernel. With a
// lower limit, the next step of a training loop would commit it again, at 2 us for 4 KiB.
constexpr std::size_t kCacheBytes = 256 * kMiB;
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
      bytes_(group.layout().sizes.symmetric_heap_bytes),
      end_(std::min(group.rank() * kRankStagger, bytes_)),
      committed_(end_ / SegmentLayout::kPage * SegmentLayout::kPage),
      growth_(kLeastGrowth) {}

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
  const std::size_t size = rounded(bytes), offset = take(size);
  blocks_.emplace(offset, size);
  used_ += size;
  return offset;
}

// Allocates from the smallest free range that is large enough, preferably a committed one.
std::size_t SymmetricHeap::take(std::size_t bytes) {
  std::optional<FreeRanges::iterator> decommitted;
  for (auto found = by_size_.lower_bound({bytes, 0}); found != by_size_.end(); ++found) {
    const auto range = ranges_.find(found->second);
    if (!range->second.decommitted) return take_range(range, bytes);
    if (!decommitted) decommitted = range;
  }
  return decommitted ? take_range(*decommitted, bytes) : extend(bytes);
}

std::size_t SymmetricHeap::take_range(FreeRanges::iterator range, std::size_t bytes) {
  const std::size_t offset = range->first;
  const FreeRange old = range->second;
  if (old.decommitted) {
    segment_->commit(begin_ + offset, bytes);
    segment_->touch(begin_ + offset, bytes);
  }
  remove(range);
  if (old.bytes > bytes) add(offset + bytes, {old.bytes - bytes, old.decommitted});
  return offset;
}

// Allocates at `end_`, or from the beginning of the committed free range that ends there.
std::size_t SymmetricHeap::extend(std::size_t bytes) {
  std::size_t offset = end_;
  const auto last = ranges_.empty() ? ranges_.end() : std::prev(ranges_.end());
  const bool adjoins = last != ranges_.end() && !last->second.decommitted &&
                       last->first + last->second.bytes == end_;
  if (adjoins) offset = last->first;
  if (bytes > bytes_ - offset)
    throw std::runtime_error(text("no place for ", bytes, " bytes in this rank's symmetric heap: ",
                                  used_, " of ", bytes_, " bytes are in use by tensors"));
  if (offset + bytes > committed_) commit_to(offset + bytes);
  if (adjoins) remove(last);
  end_ = offset + bytes;
  return offset;
}

void SymmetricHeap::commit_to(std::size_t end) {
  const auto commit = [this](std::size_t until) {
    until = std::min(SegmentLayout::up(until), bytes_);
    segment_->commit(begin_ + committed_, until - committed_);
    segment_->touch(begin_ + committed_, until - committed_);
    committed_ = until;
  };
  try {
    commit(std::max(end, committed_ + growth_));
    growth_ = std::min(growth_ * 2, kMostGrowth);
  } catch (const std::runtime_error&) {
    commit(end);  // memory may suffice for this block without the extra growth
  }
}

void SymmetricHeap::free(std::size_t offset) noexcept {
  if (fork_guard_.forked() || abort_state_.is_aborted()) return;
  const std::lock_guard lock(mutex_);
  const auto block = blocks_.find(offset);
  if (block == blocks_.end()) return;
  used_ -= block->second;
  add(offset, {block->second, false});
  blocks_.erase(block);
  if (cached_ > used_ + kCacheBytes) trim();
}

// Adds a free range, merged with adjacent free ranges of the same kind.
void SymmetricHeap::add(std::size_t offset, FreeRange range) {
  auto next = ranges_.lower_bound(offset);
  if (next != ranges_.end() && next->first == offset + range.bytes &&
      next->second.decommitted == range.decommitted) {
    range.bytes += next->second.bytes;
    remove(next++);
  }
  if (next != ranges_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second.bytes == offset &&
        before->second.decommitted == range.decommitted) {
      offset = before->first;
      range.bytes += before->second.bytes;
      remove(before);
    }
  }
  ranges_.emplace(offset, range);
  by_size_.emplace(range.bytes, offset);
  if (!range.decommitted) cached_ += range.bytes;
}

void SymmetricHeap::remove(FreeRanges::iterator range) {
  if (!range->second.decommitted) cached_ -= range->second.bytes;
  by_size_.erase({range->second.bytes, range->first});
  ranges_.erase(range);
}

// Decommits free ranges, the largest first: that takes few calls, and small ranges are requested
// most often.
void SymmetricHeap::trim() noexcept {
  for (auto last = by_size_.end(); last != by_size_.begin() && cached_ > used_ + kCacheBytes;) {
    const auto range = ranges_.find((--last)->second);
    if (range->second.decommitted) continue;
    const auto [offset, old] = *range;
    segment_->decommit(begin_ + offset, old.bytes);
    remove(range);
    add(offset, {old.bytes, true});
    last = by_size_.end();
  }
}

SymmetricHeap::HeapUsage SymmetricHeap::usage() const {
  const std::lock_guard lock(mutex_);
  return {used_, cached_ + committed_ - std::min(end_, committed_), bytes_};
}

}  // namespace pycollect::ipc
