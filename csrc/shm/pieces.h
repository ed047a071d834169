// Runs a rank's script once for each piece of the data: as much of every chunk at a time as a
// region of a slot holds. Where slots are, who moves and how ranks wait for each other is its
// Medium's: the host's is in_segment.h, the one of GPUs slabs/on_stream.h.
#pragma once
#include <algorithm>
#include <array>
#include <limits>

#include "script.h"
#include "sides.h"

namespace pycollect::shm {

inline constexpr std::size_t kLine = 64;

// Of a slot of so many bytes, for each of the script's regions; the same on all ranks. Throws
// std::invalid_argument where slots are too small for the script.
std::size_t region_bytes(std::size_t slot_bytes, const Script& script);

// One row of a move: its operands' addresses, destinations first.
struct MoveRow {
  const Move& move;
  void** at;
  std::size_t count;  // elements
};

// Ranks cut alike because they compute alike: from the script's regions and the slots' size, never
// from a size that only one of them knows.
template <class Medium>
class Pieces {
 public:
  Pieces(Medium& medium, const Sides& sides) : medium_(medium), sides_(sides) {}

  // The sides have been cut for it. If ranks do not know each other's sizes, a piece is as large as
  // there is room for; otherwise all are alike.
  void use(const Script& script, bool irregular, uint64_t call);
  uint32_t wanted() const { return wanted_; }  // as far as this rank knows

  void lead(uint64_t run);  // fills the own slot for the first piece
  void run(uint64_t first, uint32_t pieces, bool led, const Occasion& occasion);

 private:
  void run_piece(std::size_t skip, const Occasion& occasion);
  void perform(const Move& move);
  void perform(const Move& move, std::size_t begin, std::size_t end);
  void wait(const std::vector<Wait>& waits, const Occasion& occasion);
  std::byte* own(const Operand& o, std::size_t at, std::size_t& n) const;
  std::byte* others(const Operand& o, std::size_t at) const;

  Medium& medium_;
  const Sides& sides_;
  const Script* script_ = nullptr;
  uint64_t call_ = 0, run_ = 0;
  std::size_t stride_ = 0;  // bytes of a region
  std::size_t piece_ = 0;   // elements
  std::size_t from_ = 0;    // of a chunk: where the piece at hand begins
  uint32_t wanted_ = 1;
};

template <class Medium>
void Pieces<Medium>::use(const Script& script, bool irregular, uint64_t call) {
  const auto up = [](std::size_t n, std::size_t to) { return (n + to - 1) / to; };
  script_ = &script;
  call_ = call;
  wanted_ = 1;
  piece_ = std::numeric_limits<std::size_t>::max();
  if (script.regions == 0) return;
  stride_ = region_bytes(medium_.slot_bytes(), script);
  piece_ = stride_ / sides_.item();
  const std::size_t largest = sides_.largest(), per_line = kLine / sides_.item();
  if (largest <= piece_) return;
  const std::size_t pieces = up(largest, piece_);
  wanted_ = static_cast<uint32_t>(pieces);
  if (!irregular) piece_ = up(up(largest, pieces), per_line) * per_line;
}

template <class Medium>
void Pieces<Medium>::lead(uint64_t run) {
  run_ = run;
  from_ = 0;
  for (std::size_t i = 0; i < script_->leading; ++i) perform(script_->moves[i]);
}

template <class Medium>
void Pieces<Medium>::run(uint64_t first, uint32_t pieces, bool led, const Occasion& occasion) {
  for (uint32_t k = 0; k < pieces; ++k) {
    run_ = first + k;
    from_ = k * piece_;
    if (k > 0) medium_.settle(run_, occasion);
    if (k > 0 && script_->entered) medium_.advance(at_run(run_) + 1);
    run_piece(led && k == 0 ? script_->leading : 0, occasion);
    // Nobody waits for the end of a call's last run: whoever begins the next one waits for the post
    // that comes after it.
    const bool awaited = script_->moves.empty() || script_->moves.back().announced;
    if (k + 1 < pieces || awaited)
      medium_.advance(at_run(run_ + 1));
    else
      medium_.end(at_run(run_ + 1));
  }
}

template <class Medium>
void Pieces<Medium>::run_piece(std::size_t skip, const Occasion& occasion) {
  for (std::size_t i = skip; i < script_->moves.size(); ++i) {
    const Move& move = script_->moves[i];
    wait(move.waits, occasion);
    perform(move);
    const bool last = i + 1 == script_->moves.size() && script_->exit.empty();
    if (i + 1 == script_->leading || (i >= script_->leading && move.announced && !last))
      medium_.advance(at_run(run_) + move.count);
  }
  wait(script_->exit, occasion);
}

template <class Medium>
void Pieces<Medium>::wait(const std::vector<Wait>& waits, const Occasion& occasion) {
  for (const Wait w : waits) medium_.await(w.rank, at_run(run_) + w.count, occasion);
}

template <class Medium>
void Pieces<Medium>::perform(const Move& move) {
  const std::size_t size = sides_.size(move);
  if (size <= from_) return;
  const std::size_t n = std::min(piece_, size - from_);
  medium_.perform(move, n, [&](std::size_t begin, std::size_t end) { perform(move, begin, end); });
}

// As far as no side goes on in another tensor, and then from there.
template <class Medium>
void Pieces<Medium>::perform(const Move& move, std::size_t begin, std::size_t end) {
  std::array<void*, kMostOperands> at;
  while (begin < end) {
    std::size_t n = end - begin;
    for (std::size_t i = 0; i < move.operands.size(); ++i) {
      const Operand& o = move.operands[i];
      at[i] =
          o.where == Where::slot || o.rank != medium_.rank() ? others(o, begin) : own(o, begin, n);
    }
    medium_.move({move, at.data(), n});
    begin += n;
  }
}

template <class Medium>
std::byte* Pieces<Medium>::own(const Operand& o, std::size_t at, std::size_t& n) const {
  const Memories& memory = sides_.memory(o.where);
  const std::size_t element = sides_.begin(o) + from_ + at;
  if (memory.whole()) return memory.base() + element * sides_.item();
  const Memories::Piece piece = memory.find(element);
  n = std::min(n, piece.count);
  return piece.at;
}

template <class Medium>
std::byte* Pieces<Medium>::others(const Operand& o, std::size_t at) const {
  if (o.where == Where::slot)
    return medium_.slot(o.rank, run_) + o.index * stride_ + at * sides_.item();
  return medium_.place(o.rank, o.where, call_) + (sides_.begin(o) + from_ + at) * sides_.item();
}

}  // namespace pycollect::shm
