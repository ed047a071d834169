// See pinned_ring.h. Pieces are finished in the order in which they were begun, so what arrives
// twice in one place arrives in the order of the plan. Nothing here is done during a capture.
#include "pinned_ring.h"

#include <algorithm>
#include <utility>

#include "../plan/error.h"

namespace pycollect::cuda {
namespace {

constexpr std::size_t kAlign = 16;  // the widest access of a kernel

constexpr std::size_t padded(std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// What of some lines goes through one piece.
struct LinePart {
  std::size_t line, lines, first, count;
};

// Cuts `lines` of `count` items so that the padded lines of a part take `most` bytes at most.
std::vector<LinePart> cut(std::size_t lines, std::size_t count, std::size_t item,
                          std::size_t most) {
  require(most >= kAlign, "more tensors on the host in one step than a piece of the ring holds");
  std::vector<LinePart> parts;
  const std::size_t together = most / padded(count * item);
  if (together > 0) {
    for (std::size_t line = 0; line < lines; line += together)
      parts.push_back({line, std::min(together, lines - line), 0, count});
    return parts;
  }
  const std::size_t step = most / kAlign * kAlign / item;
  for (std::size_t line = 0; line < lines; ++line)
    for (std::size_t first = 0; first < count; first += step)
      parts.push_back({line, 1, first, std::min(step, count - first)});
  return parts;
}

template <class Byte>
Byte* moved(Byte* base, std::ptrdiff_t pitch, const LinePart& part, std::size_t item) {
  return base + static_cast<std::ptrdiff_t>(part.line) * pitch +
         static_cast<std::ptrdiff_t>(part.first * item);
}

struct HostSpan {
  const std::byte *begin, *end;
  bool meets(const HostSpan& other) const { return begin < other.end && other.begin < end; }
};
HostSpan span(const std::byte* base, std::ptrdiff_t pitch, const CopyRect& r) {
  const std::byte* const last = base + pitch * static_cast<std::ptrdiff_t>(r.rows - 1);
  return {std::min(base, last), std::max(base, last) + r.bytes};
}
HostSpan written(const CopyRect& r) { return span(r.dst, r.dst_pitch, r); }
HostSpan read(const CopyRect& r) { return span(r.src, r.src_pitch, r); }

CopyRect on_host(std::byte* dst, std::ptrdiff_t dst_pitch, const std::byte* src,
                 std::ptrdiff_t src_pitch, const LinePart& part, std::size_t item) {
  return {dst, src, dst_pitch, src_pitch, part.count * item, part.lines, kHost, kHost};
}

}  // namespace

PinnedRing::PinnedRing(Api& api, Host& host, PinnedRingSize size)
    : api_(api), host_(host), size_(size) {
  std::byte* const base = host.new_pinned(size.piece_bytes * size.pieces);
  for (int i = 0; i < size.pieces; ++i) pieces_.push_back({base + size.piece_bytes * i});
}

PinnedRing::~PinnedRing() {
  for (const PinnedPiece& piece : pieces_)
    for (const auto& [device, event] : piece.events) api_.destroy(event);
}

void PinnedRing::close(CurrentDevice& device) {
  PinnedPiece& piece = pieces_[at_];
  if (piece.state != State::open) return;
  device.use(piece.stream.device);
  auto event = piece.events.find(piece.stream.device);
  if (event == piece.events.end())
    event = piece.events.emplace(piece.stream.device, api_.create_event(piece.stream.device)).first;
  api_.record(event->second, piece.stream);
  piece.state = State::closed;
}

void PinnedRing::finish(CurrentDevice& device, PinnedPiece& piece) {
  if (piece.state == State::idle) return;
  if (piece.state == State::closed) {
    api_.synchronize(piece.events.at(piece.stream.device));
  } else {  // of a run that failed before it could be closed
    device.use(piece.stream.device);
    api_.synchronize(piece.stream);
  }
  piece.state = State::idle;
  for (const CopyRect& r : std::exchange(piece.leaving, {})) host_.copy(r);
}

// So much of one piece, which everything on the stream so far and from now on may use.
std::byte* PinnedRing::room(CurrentDevice& device, Stream stream, std::size_t bytes) {
  const PinnedPiece& latest = pieces_[at_];
  if (latest.state != State::open || !(latest.stream == stream) ||
      latest.used + bytes > size_.piece_bytes) {
    close(device);
    at_ = (at_ + 1) % pieces_.size();
    finish(device, pieces_[at_]);
    pieces_[at_].state = State::open;
    pieces_[at_].stream = stream;
    pieces_[at_].used = 0;
  }
  PinnedPiece& piece = pieces_[at_];
  std::byte* const begin = piece.base + piece.used;
  piece.used += bytes;
  device.use(stream.device);
  return begin;
}

// Before the host reads or writes what is still to arrive there.
void PinnedRing::settle(CurrentDevice& device, const CopyRect& r, bool reads) {
  const HostSpan mine = reads ? read(r) : written(r);
  for (const PinnedPiece& piece : pieces_)
    for (const CopyRect& leaving : piece.leaving)
      if (written(leaving).meets(mine)) return drain(device);
}

void PinnedRing::copy(CurrentDevice& device, Stream stream, const CopyRect& whole) {
  CopyRect r = whole;
  const auto line = static_cast<std::ptrdiff_t>(r.bytes);
  if (r.dst_pitch == line && r.src_pitch == line) r.bytes *= std::exchange(r.rows, 1);
  const bool enters = r.src_device == kHost;
  if (enters) settle(device, r, true);
  for (const LinePart& part : cut(r.rows, r.bytes, 1, size_.piece_bytes)) {
    const auto pitch = static_cast<std::ptrdiff_t>(padded(part.count));
    std::byte* const piece = room(device, stream, pitch * part.lines);
    std::byte* const dst = moved(r.dst, r.dst_pitch, part, 1);
    const std::byte* const src = moved(r.src, r.src_pitch, part, 1);
    if (enters) {
      host_.copy(on_host(piece, pitch, src, r.src_pitch, part, 1));
      api_.copy(stream,
                {dst, piece, r.dst_pitch, pitch, part.count, part.lines, r.dst_device, kHost});
    } else {
      api_.copy(stream,
                {piece, src, pitch, r.src_pitch, part.count, part.lines, kHost, r.src_device});
      pieces_[at_].leaving.push_back(on_host(dst, r.dst_pitch, piece, pitch, part, 1));
    }
  }
}

void PinnedRing::copy_on_host(CurrentDevice& device, const CopyRect& r) {
  settle(device, r, true);
  settle(device, r, false);
  host_.copy(r);
}

namespace {

// The pageable memory of a row, each once, however often the row names it.
struct PageableRange {
  std::byte* base;
  std::ptrdiff_t pitch;
  bool is_read = false, is_written = false;
};

class PageableRanges {
 public:
  PageableRanges(const KernelRow& row, const std::vector<bool>& is_pageable) {
    for (std::size_t i = 0; i < row.dsts.size(); ++i)
      if (is_pageable[i]) at(row.dsts[i], row.dst_pitches[i]).is_written = true;
    for (std::size_t i = 0; i < row.srcs.size(); ++i)
      if (is_pageable[row.dsts.size() + i]) at(row.srcs[i], row.src_pitches[i]).is_read = true;
  }
  std::size_t number(const std::byte* base) const {
    const auto found = std::find_if(lanes_.begin(), lanes_.end(),
                                    [&](const PageableRange& lane) { return lane.base == base; });
    return static_cast<std::size_t>(found - lanes_.begin());
  }
  std::size_t size() const { return lanes_.size(); }
  auto begin() const { return lanes_.begin(); }
  auto end() const { return lanes_.end(); }

 private:
  PageableRange& at(std::byte* base, std::ptrdiff_t pitch) {
    const std::size_t known = number(base);
    if (known == lanes_.size()) lanes_.push_back({base, pitch});
    return lanes_[known];
  }
  std::vector<PageableRange> lanes_;
};

}  // namespace

// Every lane has its part of the piece, one after the other.
void PinnedRing::launch(CurrentDevice& device, Stream stream, const Launch& launch,
                        const std::vector<bool>& is_pageable) {
  const KernelRow& row = launch.rows.front();
  const PageableRanges lanes(row, is_pageable);
  const std::size_t item = item_bytes(launch.dtype);
  for (const PageableRange& lane : lanes)
    if (lane.is_read)
      settle(device, on_host(nullptr, 0, lane.base, lane.pitch, {0, row.rows, 0, row.count}, item),
             true);
  for (const LinePart& part : cut(row.rows, row.count, item, size_.piece_bytes / lanes.size())) {
    const auto pitch = static_cast<std::ptrdiff_t>(padded(part.count * item));
    const std::size_t bytes = pitch * part.lines;
    std::byte* const piece = room(device, stream, bytes * lanes.size());
    std::vector<CopyRect> leaving;
    for (const PageableRange& lane : lanes) {
      std::byte* const theirs = moved(lane.base, lane.pitch, part, item);
      std::byte* const ours = piece + lanes.number(lane.base) * bytes;
      if (lane.is_read) host_.copy(on_host(ours, pitch, theirs, lane.pitch, part, item));
      if (lane.is_written) leaving.push_back(on_host(theirs, lane.pitch, ours, pitch, part, item));
    }
    Launch some{{row}, launch.dtype, launch.op, launch.options};
    KernelRow& mine = some.rows.front();
    mine.count = part.count;
    mine.rows = part.lines;
    const auto place = [&](std::byte*& at, std::ptrdiff_t& at_pitch) {
      const std::size_t lane = lanes.number(at);
      at = lane < lanes.size() ? piece + lane * bytes : moved(at, at_pitch, part, item);
      if (lane < lanes.size()) at_pitch = pitch;
    };
    for (std::size_t i = 0; i < row.dsts.size(); ++i) place(mine.dsts[i], mine.dst_pitches[i]);
    for (std::size_t i = 0; i < row.srcs.size(); ++i) place(mine.srcs[i], mine.src_pitches[i]);
    api_.launch(stream, some);
    auto& all = pieces_[at_].leaving;
    all.insert(all.end(), leaving.begin(), leaving.end());
  }
}

void PinnedRing::drain(CurrentDevice& device) {
  close(device);
  for (std::size_t i = 1; i <= pieces_.size(); ++i) {
    PinnedPiece& piece = pieces_[(at_ + i) % pieces_.size()];
    if (!piece.leaving.empty()) finish(device, piece);
  }
}

void PinnedRing::forget(CurrentDevice& device) noexcept {
  for (PinnedPiece& piece : pieces_) piece.leaving.clear();
  try {
    close(device);
  } catch (...) {  // the piece stays open, and its next user waits for its stream
  }
}

std::unique_ptr<PinnedRing> PinnedRings::take() {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      std::unique_ptr<PinnedRing> ring = std::move(idle_.back());
      idle_.pop_back();
      return ring;
    }
  }
  return std::make_unique<PinnedRing>(api_, host_, size_);
}

void PinnedRings::give_back(std::unique_ptr<PinnedRing> ring) {
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(ring));
}

StagingSession::~StagingSession() {
  if (ring_ == nullptr) return;
  ring_->forget(device_);
  try {
    rings_.give_back(std::move(ring_));
  } catch (...) {  // no memory for a pointer: the ring is lost, its memory is not used again
  }
}

}  // namespace pycollect::cuda
