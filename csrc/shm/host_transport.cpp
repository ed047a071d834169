// See host_transport.h. A rank that is late and finds the group broken stops soon, and does not
// say that all went well.
#include "host_transport.h"

#include <array>
#include <cstring>
#include <numeric>

#include "../plan/error.h"
#include "choice.h"
#include "chunk_loop.h"

namespace pycollect::shm {
namespace {

// Below this much the tensors' place is not looked at: copying so little is cheaper than waiting
// until the others are done with one's own memory. For each rank.
constexpr std::size_t kPlacedBytes = 512;
// An output this large is not in the caches when it has been written, and stores that pass them by
// are up to twice as fast.
constexpr std::size_t kStreamedBytes = 16 << 20;
// Below this many bytes read and written the calling thread moves them alone; no thread gets less
// than a quarter of it. See cpu/executor.cpp, where it was measured.
constexpr std::size_t kParallelBytes = 1 << 20;
constexpr std::size_t kBlock = 16 << 10;  // half a core's nearest cache
// How much a thread reads and writes before it looks at the group again: half a millisecond's, and
// the look is a load from a line that nobody writes.
constexpr std::size_t kGlanceBytes = 4 << 20;
constexpr std::size_t kLine = 64;

std::size_t quotient_up(std::size_t n, std::size_t by) { return (n + by - 1) / by; }

Agreed agree_or_skip(Group& group, const Statement& mine, uint64_t run, const Occasion& occasion) {
  try {
    return agree(group, mine, run, occasion);
  } catch (const std::invalid_argument&) {
    group.advance(at_run(run + 1));
    throw;
  }
}

}  // namespace

bool HostTransport::may_use_tensors(Collective, std::size_t bytes) const {
  return bytes >= kPlacedBytes * world() && group().layout().sizes.arena_bytes > 0;
}

std::optional<uint64_t> HostTransport::place_of(const std::byte* at, std::size_t) const {
  const auto offset = static_cast<uint64_t>(at - group().arena(rank()));
  const bool inside = offset < group().layout().sizes.arena_bytes;  // or before it: a large number
  return inside ? std::optional(offset) : std::nullopt;
}

// The others have read what this rank is going to write; getting it back takes as long as
// everything that comes before the writing.
void HostTransport::begin(const Request& request, const Occasion& occasion) {
  __builtin_prefetch(&group().line(rank()), 1);
  __builtin_prefetch(group().slot(rank(), run_number(group())), 1);
  request_ = &request;
  occasion_ = &occasion;
  row_.emplace(request.dtype, request.op, fold_options(request, world()));
  const Sizes& out = request.output.blocks;
  streamed_ =
      request.options.non_temporal && !request.in_place &&
      std::accumulate(out.begin(), out.end(), std::size_t{0}) * row_->item() >= kStreamedBytes;
}

// The first piece's copies into the own buffer come before the ranks have agreed, and the post goes
// out with them.
Agreed HostTransport::agree(const Statement& mine, ChunkLoop& loop) {
  const uint64_t first = next_run();
  const bool placed = (mine.post.flags & Post::placed) != 0;
  shm::begin(group(), first, *occasion_);
  int tasks = 0;
  whole_or_broken(group(), *occasion_, [&] { tasks = loop.enter(first, !placed); });
  // As late as can be: the others look at this line all the while, and each store takes it away
  // from them and back.
  state(group(), mine, request_);
  group().advance(at_run(first) + tasks);
  return agree_or_skip(group(), mine, first, *occasion_);
}

// Others' tensors are written at the places that they name: no rank names one outside its arena,
// but a word that was overwritten does.
void HostTransport::reach_tensors(const Script&, std::size_t bytes) {
  const Request& request = *request_;
  const std::size_t arena = group().layout().sizes.arena_bytes;
  const auto ranks = static_cast<std::size_t>(world());
  const Sizes& out = request.output.blocks;
  const Sizes& blocks = out.size() == ranks ? out : request.input.blocks;
  const auto inside = [&](Rank r, uint64_t place, Holds holds) {
    const std::size_t block = blocks.size() == ranks ? blocks[r] * row_->item() : 0;
    const std::size_t lent = holds == Holds::own_block ? block : bytes;
    return place == 0 || (place <= arena && lent <= arena - place);  // 0: nothing is lent
  };
  for (Rank r = 0; r < world(); ++r) {
    const Places& places = group().line(r).places[occasion_->call & 1];
    if (inside(r, places.input, input_of(request.collective, request.in_place)) &&
        inside(r, places.output, output_of(request.collective, request.in_place)))
      continue;
    group().abort(text("rank ", r, " lends memory that it does not have"));
    group().require_whole(*occasion_);
  }
}

std::byte* HostTransport::tensor(Rank r, Where where) const {
  const Places& places = group().line(r).places[occasion_->call & 1];
  return group().arena(r) + (where == Where::input ? places.input : places.output);
}

void HostTransport::end(uint64_t value, bool signalled) {
  if (!signalled) group().line(rank()).ended.store(value, std::memory_order_release);
}

// By as many threads as are worth it.
void HostTransport::launch(const Rows& rows) {
  if (rows.count() * row_->item() * rows.move().operands.size() < kParallelBytes)
    run(rows, 0, rows.count());
  else
    share_out(rows);
  group().require_whole(*occasion_);
}

// A thread leaves the rest when the group is broken; the calling thread raises.
void HostTransport::share_out(const Rows& rows) const {
  const std::size_t n = rows.count(), element = row_->item() * rows.move().operands.size();
  const std::size_t per_line = kLine / row_->item(), lines = quotient_up(n, per_line);
  const std::size_t grain =
      std::max<std::size_t>(1, lines / quotient_up(n * element, kParallelBytes / 4));
  const std::size_t block = quotient_up(kGlanceBytes / element, per_line) * per_line;
  const auto part = [&](int64_t first, int64_t last) {
    const std::size_t end = std::min<std::size_t>(n, last * per_line);
    for (std::size_t at = first * per_line; at < end && group().is_whole(); at += block)
      run(rows, at, std::min(end, at + block));
  };
  const auto all = static_cast<int64_t>(lines);
  if (parallel_for_)
    parallel_for_(all, static_cast<int64_t>(grain), part);
  else
    part(0, all);
}

void HostTransport::run(const Rows& rows, std::size_t begin, std::size_t end) const {
  const std::size_t operands = rows.move().operands.size();
  for (std::size_t i = rows.find(begin); begin < end; ++i) {
    const Rows::Row row = rows[i];
    const std::size_t skipped = begin - row.begin, n = std::min(end, row.begin + row.count) - begin;
    std::array<void*, kMostOperands> at;
    for (std::size_t k = 0; k < operands; ++k)
      at[k] = static_cast<std::byte*>(row.at[k]) + skipped * row_->item();
    run(rows.move(), at.data(), n);
    begin += n;
  }
}

// What goes to a buffer is folded into another destination first and copied from there while it is
// in the nearest cache: memcpy takes whole lines of a buffer from who has read them without reading
// them itself, which a fold's stores cannot. Between two cores that was 1.8 times as fast.
void HostTransport::run(const Move& move, void** at, std::size_t count) const {
  const int dsts = move.dsts, srcs = static_cast<int>(move.operands.size()) - dsts;
  const int first = dsts - move.in_slots;
  const cpu::Pointers from{at + dsts, srcs};
  if (srcs == 1 || first == 0 || first == dsts)
    return row_->run(move.finishes, {at, dsts}, from, count, streamed_ && move.in_slots == 0);
  const std::size_t item = row_->item(), block = kBlock / item;
  for (std::size_t done = 0; done < count; done += block) {
    const std::size_t some = std::min(block, count - done);
    row_->run(move.finishes, {at, first}, from, some, false);
    for (int d = first; d < dsts; ++d) std::memcpy(at[d], at[0], some * item);
    for (std::size_t i = 0; i < move.operands.size(); ++i)
      at[i] = static_cast<std::byte*>(at[i]) + some * item;
  }
}

}  // namespace pycollect::shm
