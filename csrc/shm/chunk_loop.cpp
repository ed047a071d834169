// See chunk_loop.h. Nothing on the way of a small call allocates.
#include "chunk_loop.h"

#include <limits>

#include "../plan/error.h"

namespace pycollect::shm {
namespace {

constexpr std::size_t kLine = 64;

std::size_t quotient_up(std::size_t n, std::size_t by) { return (n + by - 1) / by; }

}  // namespace

std::size_t region_bytes(std::size_t buffer_bytes, const Script& script) {
  const auto n = static_cast<std::size_t>(std::max(script.regions, 1));
  if (n == 1 && buffer_bytes >= kLine) return buffer_bytes / kLine * kLine;
  require(buffer_bytes / n >= kLine, "slots of ", buffer_bytes, " bytes are too small for ", n,
          " chunks; a group of so many ranks needs slots of at least ", n * kLine, " bytes");
  return buffer_bytes / n / kLine * kLine;
}

void ChunkLoop::use(const Script& script, bool irregular) {
  script_ = &script;
  pieces_ = 1;
  piece_ = std::numeric_limits<std::size_t>::max();
  if (script.regions == 0) return;
  stride_ = region_bytes(transport_.buffer_bytes(), script);
  piece_ = stride_ / sides_.item();
  const std::size_t largest = sides_.largest(), per_line = kLine / sides_.item();
  if (largest <= piece_) return;
  const std::size_t pieces = quotient_up(largest, piece_);
  pieces_ = static_cast<uint32_t>(pieces);
  if (!irregular) piece_ = quotient_up(quotient_up(largest, pieces), per_line) * per_line;
}

int ChunkLoop::enter(uint64_t run, bool fill) {
  run_ = run;
  entered_ = true;
  if (!fill) return 1;  // the first task of every run is its entry
  while (filled_ < script_->leading) perform(script_->moves[filled_++]);
  return script_->led();
}

void ChunkLoop::run(uint64_t first, uint32_t pieces) {
  // Nobody waits for the end of a call's last run: who begins the next one waits for the post that
  // comes after it.
  const bool awaited = script_->moves.empty() || script_->moves.back().announced;
  for (uint32_t k = 0; k < pieces; ++k) {
    run_ = first + k;
    from_ = k * piece_;
    if (!std::exchange(entered_, false)) {
      if (script_->regions > 0) transport_.settle(run_);
      // The first time always: with it a rank says that it is done with all calls before.
      if (k == 0 || script_->entered) transport_.signal(at_run(run_) + 1);
    }
    run_piece(std::exchange(filled_, 0));
    const bool signals = k + 1 < pieces || awaited;
    if (signals) transport_.signal(at_run(run_ + 1));
    if (k + 1 == pieces) transport_.end(at_run(run_ + 1), signals);
  }
}

void ChunkLoop::run_piece(std::size_t skip) {
  for (std::size_t i = skip; i < script_->moves.size(); ++i) {
    const Move& move = script_->moves[i];
    wait(move.waits);
    perform(move);
    const bool last = i + 1 == script_->moves.size() && script_->exit.empty();
    if (i + 1 == script_->leading || (i >= script_->leading && move.announced && !last))
      transport_.signal(at_run(run_) + move.count);
  }
  wait(script_->exit);
}

void ChunkLoop::wait(const std::vector<Wait>& waits) {
  for (const Wait w : waits) transport_.wait(w.rank, at_run(run_) + w.count);
}

void ChunkLoop::perform(const Move& move) {
  const std::size_t size = sides_.size(move);
  if (size <= from_) return;
  const std::size_t n = std::min(piece_, size - from_);
  Rows& rows = transport_.rows();
  rows.clear(move);
  for (std::size_t begin = 0; begin < n;) {
    std::size_t count = n - begin;
    void** const at = rows.open();
    for (std::size_t i = 0; i < move.operands.size(); ++i) {
      const Operand& o = move.operands[i];
      const bool is_own = o.where != Where::slot && o.rank == transport_.rank();
      at[i] = is_own ? own(o, begin, count) : others(o, begin);
    }
    rows.close(begin += count);
  }
  transport_.launch(rows);
}

// Also how many elements there are at most until another tensor begins.
std::byte* ChunkLoop::own(const Operand& o, std::size_t at, std::size_t& n) const {
  const Memories& memory = sides_.memory(o.where);
  const std::size_t element = sides_.begin(o) + from_ + at;
  if (memory.whole()) return memory.base() + element * sides_.item();
  const Memories::Piece piece = memory.find(element);
  n = std::min(n, piece.count);
  return piece.at;
}

std::byte* ChunkLoop::others(const Operand& o, std::size_t at) const {
  if (o.where == Where::slot)
    return transport_.buffer(o.rank, run_) + o.index * stride_ + at * sides_.item();
  return transport_.tensor(o.rank, o.where) + (sides_.begin(o) + from_ + at) * sides_.item();
}

}  // namespace pycollect::shm
