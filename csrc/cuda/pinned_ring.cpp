// See pinned_ring.h. Pieces are finished in the order in which they were begun, so several writes
// to the same memory arrive in the order of the plan. Rings are not used during a capture.
#include "pinned_ring.h"

#include <algorithm>
#include <utility>

#include "../plan/error.h"

namespace pycollect::cuda {
namespace {

constexpr std::size_t kAlign = 16;  // the widest access of a kernel

constexpr std::size_t padded(std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// The part of a task's rows that goes through one piece: elements [first, first + count) of each
// row in [row, row + rows).
struct RowPart {
  std::size_t row, rows, first, count;
};

// Cuts `rows` rows of `count` items into parts whose padded rows take at most `max_bytes`.
std::vector<RowPart> cut(std::size_t rows, std::size_t count, std::size_t item,
                         std::size_t max_bytes) {
  require(max_bytes >= kAlign,
          "one step has more tensors in pageable host memory than a piece of the "
          "pinned ring has room for; pin some of them with .pin_memory()");
  std::vector<RowPart> parts;
  const std::size_t together = max_bytes / padded(count * item);
  if (together > 0) {
    for (std::size_t row = 0; row < rows; row += together)
      parts.push_back({row, std::min(together, rows - row), 0, count});
    return parts;
  }
  const std::size_t step = max_bytes / kAlign * kAlign / item;
  for (std::size_t row = 0; row < rows; ++row)
    for (std::size_t first = 0; first < count; first += step)
      parts.push_back({row, 1, first, std::min(step, count - first)});
  return parts;
}

template <class Byte>
Byte* part_begin(Byte* base, std::ptrdiff_t pitch, const RowPart& part, std::size_t item) {
  return base + static_cast<std::ptrdiff_t>(part.row) * pitch +
         static_cast<std::ptrdiff_t>(part.first * item);
}

struct HostSpan {
  const std::byte *begin, *end;
  bool overlaps(const HostSpan& other) const { return begin < other.end && other.begin < end; }
};
HostSpan span(const std::byte* base, std::ptrdiff_t pitch, const CopyRect& r) {
  const std::byte* const last = base + pitch * static_cast<std::ptrdiff_t>(r.rows - 1);
  return {std::min(base, last), std::max(base, last) + r.bytes};
}
HostSpan written(const CopyRect& r) { return span(r.dst, r.dst_pitch, r); }
HostSpan read(const CopyRect& r) { return span(r.src, r.src_pitch, r); }

CopyRect on_host(std::byte* dst, std::ptrdiff_t dst_pitch, const std::byte* src,
                 std::ptrdiff_t src_pitch, const RowPart& part, std::size_t item) {
  return {dst, src, dst_pitch, src_pitch, part.count * item, part.rows, kHost, kHost};
}

}  // namespace

PinnedRing::PinnedRing(Api& api, HostMemoryOps& host)
    : api_(api), host_(host), size_(host.ring_size()) {
  std::byte* const base = host.new_pinned(size_.piece_bytes * size_.pieces);
  for (int i = 0; i < size_.pieces; ++i) pieces_.push_back({base + size_.piece_bytes * i});
}

PinnedRing::~PinnedRing() {
  for (const PinnedPiece& piece : pieces_)
    for (const auto& [device, event] : piece.events) api_.destroy(event);
}

void PinnedRing::close(DeviceGuard& device) {
  PinnedPiece& piece = pieces_[at_];
  if (piece.state != PieceState::open) return;
  device.use(piece.stream.device);
  auto event = piece.events.find(piece.stream.device);
  if (event == piece.events.end())
    event = piece.events.emplace(piece.stream.device, api_.create_event(piece.stream.device)).first;
  api_.record(event->second, piece.stream);
  piece.state = PieceState::closed;
}

void PinnedRing::finish(DeviceGuard& device, PinnedPiece& piece) {
  if (piece.state == PieceState::idle) return;
  if (piece.state == PieceState::closed) {
    api_.synchronize(piece.events.at(piece.stream.device));
  } else {  // of a run that failed before it closed the piece
    device.use(piece.stream.device);
    api_.synchronize(piece.stream);
  }
  piece.state = PieceState::idle;
  for (const CopyRect& r : std::exchange(piece.host_copies, {})) host_.copy(r);
}

// Reserves `bytes` of one piece, for use by work on the stream.
std::byte* PinnedRing::reserve(DeviceGuard& device, Stream stream, std::size_t bytes) {
  const PinnedPiece& latest = pieces_[at_];
  if (latest.state != PieceState::open || !(latest.stream == stream) ||
      latest.used + bytes > size_.piece_bytes) {
    close(device);
    at_ = (at_ + 1) % pieces_.size();
    finish(device, pieces_[at_]);
    pieces_[at_].state = PieceState::open;
    pieces_[at_].stream = stream;
    pieces_[at_].used = 0;
  }
  PinnedPiece& piece = pieces_[at_];
  std::byte* const begin = piece.base + piece.used;
  piece.used += bytes;
  device.use(stream.device);
  return begin;
}

// Drains the ring if an outstanding copy writes to the source (`reads`) or the destination of `r`,
// so that the host may access it.
void PinnedRing::drain_if_overlapping(DeviceGuard& device, const CopyRect& r, bool reads) {
  const HostSpan accessed = reads ? read(r) : written(r);
  for (const PinnedPiece& piece : pieces_)
    for (const CopyRect& pending : piece.host_copies)
      if (written(pending).overlaps(accessed)) return drain(device);
}

void PinnedRing::copy(DeviceGuard& device, Stream stream, const CopyRect& whole) {
  CopyRect r = whole;
  const auto row_bytes = static_cast<std::ptrdiff_t>(r.bytes);
  if (r.dst_pitch == row_bytes && r.src_pitch == row_bytes) r.bytes *= std::exchange(r.rows, 1);
  const bool from_host = r.src_device == kHost;
  if (from_host) drain_if_overlapping(device, r, true);
  for (const RowPart& part : cut(r.rows, r.bytes, 1, size_.piece_bytes)) {
    const auto pitch = static_cast<std::ptrdiff_t>(padded(part.count));
    std::byte* const piece = reserve(device, stream, pitch * part.rows);
    std::byte* const dst = part_begin(r.dst, r.dst_pitch, part, 1);
    const std::byte* const src = part_begin(r.src, r.src_pitch, part, 1);
    if (from_host) {
      host_.copy(on_host(piece, pitch, src, r.src_pitch, part, 1));
      api_.copy(stream,
                {dst, piece, r.dst_pitch, pitch, part.count, part.rows, r.dst_device, kHost});
    } else {
      api_.copy(stream,
                {piece, src, pitch, r.src_pitch, part.count, part.rows, kHost, r.src_device});
      pieces_[at_].host_copies.push_back(on_host(dst, r.dst_pitch, piece, pitch, part, 1));
    }
  }
}

void PinnedRing::copy_on_host(DeviceGuard& device, const CopyRect& r) {
  drain_if_overlapping(device, r, true);
  drain_if_overlapping(device, r, false);
  host_.copy(r);
}

namespace {

// Pageable memory of a task; memory that the task uses several times is one range.
struct PageableRange {
  std::byte* base;
  std::ptrdiff_t pitch;
  bool is_read = false, is_written = false;
};

class PageableRanges {
 public:
  PageableRanges(const KernelTask& task, const std::vector<bool>& is_pageable) {
    for (std::size_t i = 0; i < task.dsts.size(); ++i)
      if (is_pageable[i]) at(task.dsts[i], task.dst_pitches[i]).is_written = true;
    for (std::size_t i = 0; i < task.srcs.size(); ++i)
      if (is_pageable[task.dsts.size() + i]) at(task.srcs[i], task.src_pitches[i]).is_read = true;
  }
  std::size_t index_of(const std::byte* base) const {
    const auto found = std::find_if(ranges_.begin(), ranges_.end(),
                                    [&](const PageableRange& range) { return range.base == base; });
    return static_cast<std::size_t>(found - ranges_.begin());
  }
  std::size_t size() const { return ranges_.size(); }
  auto begin() const { return ranges_.begin(); }
  auto end() const { return ranges_.end(); }

 private:
  PageableRange& at(std::byte* base, std::ptrdiff_t pitch) {
    const std::size_t known = index_of(base);
    if (known == ranges_.size()) ranges_.push_back({base, pitch});
    return ranges_[known];
  }
  std::vector<PageableRange> ranges_;
};

}  // namespace

// The pageable ranges have consecutive parts of the piece.
void PinnedRing::launch(DeviceGuard& device, Stream stream, const Launch& launch,
                        const std::vector<bool>& is_pageable) {
  const KernelTask& task = launch.tasks.front();
  const PageableRanges ranges(task, is_pageable);
  const std::size_t item = item_bytes(launch.dtype);
  for (const PageableRange& range : ranges)
    if (range.is_read)
      drain_if_overlapping(
          device, on_host(nullptr, 0, range.base, range.pitch, {0, task.rows, 0, task.count}, item),
          true);
  for (const RowPart& part : cut(task.rows, task.count, item, size_.piece_bytes / ranges.size())) {
    const auto pitch = static_cast<std::ptrdiff_t>(padded(part.count * item));
    const std::size_t bytes = pitch * part.rows;
    std::byte* const piece = reserve(device, stream, bytes * ranges.size());
    std::vector<CopyRect> host_copies;
    for (const PageableRange& range : ranges) {
      std::byte* const pageable = part_begin(range.base, range.pitch, part, item);
      std::byte* const pinned = piece + ranges.index_of(range.base) * bytes;
      if (range.is_read) host_.copy(on_host(pinned, pitch, pageable, range.pitch, part, item));
      if (range.is_written)
        host_copies.push_back(on_host(pageable, range.pitch, pinned, pitch, part, item));
    }
    Launch part_launch{{task}, launch.dtype, launch.op, launch.options};
    KernelTask& part_task = part_launch.tasks.front();
    part_task.count = part.count;
    part_task.rows = part.rows;
    const auto place = [&](std::byte*& at, std::ptrdiff_t& at_pitch) {
      const std::size_t i = ranges.index_of(at);
      at = i < ranges.size() ? piece + i * bytes : part_begin(at, at_pitch, part, item);
      if (i < ranges.size()) at_pitch = pitch;
    };
    for (std::size_t i = 0; i < task.dsts.size(); ++i)
      place(part_task.dsts[i], part_task.dst_pitches[i]);
    for (std::size_t i = 0; i < task.srcs.size(); ++i)
      place(part_task.srcs[i], part_task.src_pitches[i]);
    api_.launch(stream, part_launch);
    auto& all = pieces_[at_].host_copies;
    all.insert(all.end(), host_copies.begin(), host_copies.end());
  }
}

void PinnedRing::drain(DeviceGuard& device) {
  close(device);
  for (std::size_t i = 1; i <= pieces_.size(); ++i) {
    PinnedPiece& piece = pieces_[(at_ + i) % pieces_.size()];
    if (!piece.host_copies.empty()) finish(device, piece);
  }
}

void PinnedRing::discard(DeviceGuard& device) noexcept {
  for (PinnedPiece& piece : pieces_) piece.host_copies.clear();
  try {
    close(device);
  } catch (...) {  // the piece stays open, and its next user waits for its stream
  }
}

std::unique_ptr<PinnedRing> PinnedRingPool::take() {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      std::unique_ptr<PinnedRing> ring = std::move(idle_.back());
      idle_.pop_back();
      return ring;
    }
  }
  return std::make_unique<PinnedRing>(api_, host_);
}

void PinnedRingPool::give_back(std::unique_ptr<PinnedRing> ring) {
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(ring));
}

PinnedRingLease::~PinnedRingLease() {
  if (ring_ == nullptr) return;
  ring_->discard(device_);
  try {
    rings_.give_back(std::move(ring_));
  } catch (...) {  // out of memory: the ring is lost, and its pinned memory is not reused
  }
}

}  // namespace pycollect::cuda
