// The host's medium: slots and arenas are in the group's shared memory, the rank's own threads move
// what is in them, and ranks wait for each other's counters. See pieces.h. Whoever was late and
// finds that the others have given up stops soon, and does not say that all went well.
#pragma once
#include <cstring>

#include "../cpu/executor.h"
#include "../cpu/step_runner.h"
#include "agreement.h"
#include "pieces.h"

namespace pycollect::shm {

class InSegment {
 public:
  struct By {
    const cpu::RowRunner& row;
    const cpu::ParallelFor& parallel_for;
    bool streamed;
  };
  InSegment(Group& group, const Occasion& occasion, const By& by)
      : group_(group),
        occasion_(occasion),
        row_(by.row),
        parallel_for_(by.parallel_for),
        streamed_(by.streamed) {}

  Rank rank() const { return group_.rank(); }
  std::size_t slot_bytes() const { return group_.layout().sizes.slot_bytes; }
  std::byte* slot(Rank r, uint64_t run) const { return group_.slot(r, run); }
  std::byte* place(Rank r, Where where, uint64_t call) const {
    const Places& places = group_.line(r).places[call & 1];
    return group_.arena(r) + (where == Where::input ? places.input : places.output);
  }

  void settle(uint64_t run, const Occasion& occasion) { shm::settle(group_, run, occasion); }
  void await(Rank r, uint64_t wanted, const Occasion& occasion) {
    group_.await(r, wanted, occasion);
  }
  void advance(uint64_t done) { group_.advance(done); }
  void end(uint64_t done) {
    group_.line(group_.rank()).ended.store(done, std::memory_order_release);
  }

  // Some elements of a move, by as many threads as are worth it.
  template <class Rows>
  void perform(const Move& move, std::size_t n, const Rows& rows) const {
    const std::size_t moved = n * row_.item() * move.operands.size();
    if (moved < kParallelBytes)
      rows(std::size_t{0}, n);
    else
      share_out(move, n, rows);
    group_.require_whole(occasion_);
  }

  // What goes to a slot is folded into another destination first and copied from there while it is
  // in the nearest cache: memcpy takes whole lines of a slot from who has read them without reading
  // them itself, which a fold's stores cannot. Between two cores that was 1.8 times as fast.
  void move(const MoveRow& r) const {
    const int dsts = r.move.dsts, srcs = static_cast<int>(r.move.operands.size()) - dsts;
    const int first = dsts - r.move.in_slots;
    const cpu::Pointers all{r.at, dsts}, from{r.at + dsts, srcs};
    if (srcs == 1 || first == 0 || first == dsts)
      return row_.run(r.move.finishes, all, from, r.count, streamed_ && r.move.in_slots == 0);
    const std::size_t item = row_.item(), block = kBlock / item;
    for (std::size_t done = 0; done < r.count; done += block) {
      const std::size_t some = std::min(block, r.count - done);
      row_.run(r.move.finishes, {r.at, first}, from, some, false);
      for (int d = first; d < dsts; ++d) std::memcpy(r.at[d], r.at[0], some * item);
      for (std::size_t i = 0; i < r.move.operands.size(); ++i)
        r.at[i] = static_cast<std::byte*>(r.at[i]) + some * item;
    }
  }

 private:
  // A thread leaves the rest when the group is broken; whoever shared it out says so.
  template <class Rows>
  void share_out(const Move& move, std::size_t n, const Rows& rows) const {
    const auto up = [](std::size_t n, std::size_t to) { return (n + to - 1) / to; };
    const std::size_t element = row_.item() * move.operands.size(), moved = n * element;
    const std::size_t per_line = kLine / row_.item(), lines = up(n, per_line);
    const std::size_t grain = std::max<std::size_t>(1, lines / up(moved, kParallelBytes / 4));
    const std::size_t block = up(kGlanceBytes / element, per_line) * per_line;
    const auto part = [&](int64_t first, int64_t last) {
      const std::size_t end = std::min<std::size_t>(n, last * per_line);
      for (std::size_t at = first * per_line; at < end && group_.is_whole(); at += block)
        rows(at, std::min(end, at + block));
    };
    const auto all = static_cast<int64_t>(lines);
    if (parallel_for_)
      parallel_for_(all, static_cast<int64_t>(grain), part);
    else
      part(0, all);
  }

  // Below this many bytes read and written the calling thread moves them alone; no thread gets less
  // than a quarter of it. See cpu/executor.cpp, where it was measured.
  static constexpr std::size_t kParallelBytes = 1 << 20;
  static constexpr std::size_t kBlock = 16 << 10;  // half a core's nearest cache
  // How much a thread reads and writes before it looks at the group again: half a millisecond's,
  // and the look is a load from a line that nobody writes.
  static constexpr std::size_t kGlanceBytes = 4 << 20;

  Group& group_;
  const Occasion& occasion_;
  const cpu::RowRunner& row_;
  const cpu::ParallelFor& parallel_for_;
  const bool streamed_;
};

}  // namespace pycollect::shm
