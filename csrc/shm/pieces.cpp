// See pieces.h. Ranks cut alike because they compute alike: from the script's regions and the
// group's slots, never from a size that only one of them knows.
#include "pieces.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "../plan/error.h"
#include "agreement.h"

namespace pycollect::shm {
namespace {

constexpr std::size_t kLine = 64;
// Below this many bytes read and written the calling thread moves them alone; no thread gets less
// than a quarter of it. See cpu/executor.cpp, where it was measured.
constexpr std::size_t kParallelBytes = 1 << 20;

// Half a core's nearest cache.
constexpr std::size_t kBlock = 16 << 10;

std::size_t up(std::size_t n, std::size_t to) { return (n + to - 1) / to; }

}  // namespace

std::size_t region_bytes(const Group& group, const Script& script) {
  const std::size_t all = group.layout().sizes.slot_bytes;
  const auto n = static_cast<std::size_t>(std::max(script.regions, 1));
  if (n == 1 && all >= kLine) return all / kLine * kLine;
  require(all / n >= kLine, "slots of ", all, " bytes are too small for ", n,
          " chunks; a group of so many ranks needs slots of at least ", n * kLine, " bytes");
  return all / n / kLine * kLine;
}

void Pieces::use(const Script& script, bool irregular, uint64_t call, bool streamed) {
  script_ = &script;
  call_ = call;
  streamed_ = streamed;
  wanted_ = 1;
  piece_ = std::numeric_limits<std::size_t>::max();
  if (script.regions == 0) return;
  stride_ = region_bytes(group_, script);
  piece_ = stride_ / sides_.item();
  const std::size_t largest = sides_.largest(), per_line = kLine / sides_.item();
  if (largest <= piece_) return;
  const std::size_t pieces = up(largest, piece_);
  wanted_ = static_cast<uint32_t>(pieces);
  if (!irregular) piece_ = up(up(largest, pieces), per_line) * per_line;
}

void Pieces::lead(uint64_t run) {
  run_ = run;
  from_ = 0;
  for (std::size_t i = 0; i < script_->leading; ++i) perform(script_->moves[i]);
}

void Pieces::run(uint64_t first, uint32_t pieces, bool led, const Occasion& occasion) {
  for (uint32_t k = 0; k < pieces; ++k) {
    run_ = first + k;
    from_ = k * piece_;
    if (k > 0) settle(group_, run_, occasion);
    if (k > 0 && script_->entered) group_.advance(at_run(run_) + 1);
    run_piece(led && k == 0 ? script_->leading : 0, occasion);
    // Nobody waits for the end of a call's last run: whoever begins the next one waits for the post
    // that comes after it.
    const bool awaited = script_->moves.empty() || script_->moves.back().announced;
    if (k + 1 < pieces || awaited)
      group_.advance(at_run(run_ + 1));
    else
      group_.line(group_.rank()).ended.store(at_run(run_ + 1), std::memory_order_release);
  }
}

void Pieces::run_piece(std::size_t skip, const Occasion& occasion) {
  for (std::size_t i = skip; i < script_->moves.size(); ++i) {
    const Move& move = script_->moves[i];
    wait(move.waits, occasion);
    perform(move);
    const bool last = i + 1 == script_->moves.size() && script_->exit.empty();
    if (i + 1 == script_->leading || (i >= script_->leading && move.announced && !last))
      group_.advance(at_run(run_) + move.count);
  }
  wait(script_->exit, occasion);
}

void Pieces::wait(const std::vector<Wait>& waits, const Occasion& occasion) {
  for (const Wait w : waits) group_.await(w.rank, at_run(run_) + w.count, occasion);
}

void Pieces::perform(const Move& move) {
  const std::size_t size = sides_.size(move);
  if (size <= from_) return;
  const std::size_t n = std::min(piece_, size - from_);
  const std::size_t moved = n * sides_.item() * move.operands.size();
  if (moved < kParallelBytes || !parallel_for_) return perform(move, 0, n);
  const std::size_t per_line = kLine / sides_.item(), lines = up(n, per_line);
  const std::size_t grain = std::max<std::size_t>(1, lines / up(moved, kParallelBytes / 4));
  parallel_for_(static_cast<int64_t>(lines), static_cast<int64_t>(grain),
                [&](int64_t begin, int64_t end) {
                  perform(move, begin * per_line, std::min<std::size_t>(n, end * per_line));
                });
}

// As far as no side goes on in another tensor, and then from there.
void Pieces::perform(const Move& move, std::size_t begin, std::size_t end) {
  std::array<void*, kMostOperands> at;
  while (begin < end) {
    std::size_t n = end - begin;
    for (std::size_t i = 0; i < move.operands.size(); ++i) {
      const Operand& o = move.operands[i];
      at[i] =
          o.where == Where::slot || o.rank != group_.rank() ? others(o, begin) : own(o, begin, n);
    }
    move_row(move, at.data(), n);
    begin += n;
  }
}

// What goes to a slot is folded into another destination first and copied from there while it is in
// the nearest cache: memcpy takes whole lines of a slot from who has read them without reading them
// itself, which a fold's stores cannot. Between two cores that was 1.8 times as fast.
void Pieces::move_row(const Move& move, void** at, std::size_t n) const {
  const int dsts = move.dsts, srcs = static_cast<int>(move.operands.size()) - dsts;
  const int first = dsts - move.in_slots;
  const cpu::Pointers all{at, dsts}, from{at + dsts, srcs};
  if (srcs == 1 || first == 0 || first == dsts)
    return row_.run(move.finishes, all, from, n, streamed_ && move.in_slots == 0);
  const std::size_t block = kBlock / sides_.item();
  for (std::size_t done = 0; done < n; done += block) {
    const std::size_t some = std::min(block, n - done);
    row_.run(move.finishes, {at, first}, from, some, false);
    for (int d = first; d < dsts; ++d) std::memcpy(at[d], at[0], some * sides_.item());
    for (std::size_t i = 0; i < move.operands.size(); ++i)
      at[i] = static_cast<std::byte*>(at[i]) + some * sides_.item();
  }
}

std::byte* Pieces::own(const Operand& o, std::size_t at, std::size_t& n) const {
  const Memories& memory = sides_.memory(o.where);
  const std::size_t element = sides_.begin(o) + from_ + at;
  if (memory.whole()) return memory.base() + element * sides_.item();
  const Memories::Piece piece = memory.find(element);
  n = std::min(n, piece.count);
  return piece.at;
}

std::byte* Pieces::others(const Operand& o, std::size_t at) const {
  if (o.where == Where::slot)
    return group_.slot(o.rank, run_) + o.index * stride_ + at * sides_.item();
  const Places& places = group_.line(o.rank).places[call_ & 1];
  return group_.arena(o.rank) + (o.where == Where::input ? places.input : places.output) +
         (sides_.begin(o) + from_ + at) * sides_.item();
}

}  // namespace pycollect::shm
