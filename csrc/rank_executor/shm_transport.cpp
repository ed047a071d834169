// See shm_transport.h. A late rank that finds the group aborted stops soon and throws; it never
// returns success.
#include "shm_transport.h"

#include <array>
#include <atomic>
#include <cstring>
#include <numeric>
#include <utility>

#include "../plan/error.h"
#include "chunk_loop.h"
#include "program_choice.h"

namespace pycollect::ipc {
namespace {

// Below this many bytes per rank, zero-copy is not tried: copying so little is cheaper than waiting
// until the peers have finished with this rank's tensors.
constexpr std::size_t kZeroCopyBytes = 512;
// An output of at least this many bytes does not stay in the caches anyway, and non-temporal stores
// are up to twice as fast.
constexpr std::size_t kStreamedBytes = 16 << 20;
// Below this many bytes read and written, the calling thread works alone; no thread gets less than
// a quarter of this. cpu/executor.cpp has the measurement.
constexpr std::size_t kParallelBytes = 1 << 20;
constexpr std::size_t kBlock = 16 << 10;  // half of a core's L1 data cache
// How many bytes a thread reads and writes between two polls of the abort state: about half a
// millisecond. A poll is a load from a line that no rank writes while the group is healthy.
constexpr std::size_t kBytesPerPoll = 4 << 20;
constexpr std::size_t kLine = 64;

std::size_t ceil_div(std::size_t n, std::size_t by) { return (n + by - 1) / by; }

// Fetches a cache line that this core is going to write. The compiler's own prefetch for writing is
// one for reading unless it may assume the instruction, and does nothing for a line of which this
// core has a copy that others share. Processors without the instruction ignore it.
void prefetch_to_write(const void* line) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(line)));
#else
  __builtin_prefetch(line, 1);
#endif
}

Agreement agree_or_skip(Transport& transport, const CallFingerprint& mine, uint64_t run,
                        const OpContext& context, ChunkLoop& loop) {
  try {
    return agree(transport, mine, run, context, &loop);
  } catch (const std::invalid_argument&) {
    transport.group().advance(at_run(run + 1));
    throw;
  }
}

}  // namespace

bool ShmTransport::may_use_tensors(std::size_t bytes) const {
  return bytes >= kZeroCopyBytes * world() && group().layout().sizes.symmetric_heap_bytes > 0;
}

std::optional<uint64_t> ShmTransport::registered_offset(const std::byte* at) const {
  const auto offset = static_cast<uint64_t>(at - group().heap(group().rank()));
  // An address before the heap wraps around to a large offset.
  const bool inside = offset < group().layout().sizes.symmetric_heap_bytes;
  return inside ? std::optional(offset) : std::nullopt;
}

// Prefetches the cache lines that this rank is going to write and that peers have read: fetching
// them takes as long as the rest of the call up to the first write. Of a staging buffer only where
// one line is all of the data: the copy of more data fetches lines side by side, and a line that is
// fetched before them makes it 4 % slower.
void ShmTransport::begin(const CollectiveRequest& request, const OpContext& context) {
  prefetch_to_write(&group().rank_state(group().rank()));
  const auto& data = request.input.segments;
  if (!data.empty() && data[0].count * item_bytes(request.dtype) <= kLine)
    prefetch_to_write(group().staging_buffer(group().rank(), next_run()));
  request_ = &request;
  context_ = &context;
  row_.emplace(request.dtype, request.op, fold_options(request, world()));
  const Sizes& out = request.output.blocks;
  non_temporal_ =
      request.options.non_temporal && !request.in_place &&
      std::accumulate(out.begin(), out.end(), std::size_t{0}) * row_->item() >= kStreamedBytes;
}

void ShmTransport::reserve(const RankProgram& rank_program, const Group::StagingRegions& regions,
                           bool irregular) {
  if (group().reserve_staging(rank_program.fills, regions) && !irregular)
    unmapped_.emplace_back(rank_program.filled, regions);
}

// Without zero-copy, copies the first piece into this rank's staging buffer before the ranks have
// agreed, so that one signal publishes both the fingerprint and the data.
Agreement ShmTransport::agree(const CallFingerprint& mine, ChunkLoop& loop) {
  const uint64_t first = next_run();
  const bool zero_copy = (mine.fingerprint.flags & Fingerprint::zero_copy) != 0;
  ipc::begin(group(), first, *context_);
  int tasks = 0;
  abort_on_error(group(), *context_, [&] { tasks = loop.enter(first, !zero_copy); });
  // Write the fingerprint as late as possible: peers poll its line, and each store moves the line
  // away from them and back.
  publish(group(), mine, request_);
  group().advance(at_run(first) + tasks);
  const Agreement agreed = agree_or_skip(*this, mine, first, *context_, loop);
  for (const auto& [ranks, regions] : std::exchange(unmapped_, {}))
    group().map_staging(ranks, regions);
  return agreed;
}

// Checks the registered offsets at which this rank will access the peers' tensors. No rank
// publishes an offset outside its heap, but an overwritten word may hold one. Offset 0 (a tensor
// that is not exposed, or rank 0's first) always passes.
void ShmTransport::check_exposed(std::size_t bytes) {
  const CollectiveRequest& request = *request_;
  const std::size_t heap = group().layout().sizes.symmetric_heap_bytes;
  const auto ranks = static_cast<std::size_t>(world());
  const Sizes& out = request.output.blocks;
  const Sizes& blocks = out.size() == ranks ? out : request.input.blocks;
  const auto inside = [&](Rank r, uint64_t offset, BlockContent holds) {
    const std::size_t block = blocks.size() == ranks ? blocks[r] * row_->item() : 0;
    const std::size_t exposed = holds == BlockContent::own_block ? block : bytes;
    return offset == 0 || (offset <= heap && exposed <= heap - offset);
  };
  for (Rank r = 0; r < world(); ++r) {
    const RegisteredOffsets& registered = group().rank_state(r).registered[context_->call & 1];
    if (inside(r, registered.input, input_of(request.collective, request.in_place)) &&
        inside(r, registered.output, output_of(request.collective, request.in_place)))
      continue;
    group().abort(
        text("rank ", group().world_rank(r), " exposed a tensor outside its shared memory"));
    group().require_healthy(*context_);
  }
}

std::byte* ShmTransport::tensor(Rank r, OperandBuffer where) const {
  const RegisteredOffsets& registered = group().rank_state(r).registered[context_->call & 1];
  return group().heap(r) + (where == OperandBuffer::input ? registered.input : registered.output);
}

void ShmTransport::end(uint64_t value, bool signalled) {
  if (!signalled) group().rank_state(group().rank()).ended.store(value, std::memory_order_release);
}

// Moves the rows with one thread, or with several from kParallelBytes on.
void ShmTransport::launch(const Rows& rows) {
  if (rows.count() * row_->item() * rows.instruction().operands.size() < kParallelBytes)
    for (std::size_t i = 0; i < rows.size(); ++i)
      run(rows.instruction(), rows[i].at, rows[i].count);
  else
    run_parallel(rows);
  std::atomic_thread_fence(std::memory_order_acquire);  // after the reads of peers' memory
  group().require_run(*context_);
}

// Moves the rows with several threads. Each stops early when the group is aborted; the calling
// thread throws afterwards.
void ShmTransport::run_parallel(const Rows& rows) const {
  const std::size_t n = rows.count(), element = row_->item() * rows.instruction().operands.size();
  const std::size_t per_line = kLine / row_->item(), lines = ceil_div(n, per_line);
  const std::size_t grain =
      std::max<std::size_t>(1, lines / ceil_div(n * element, kParallelBytes / 4));
  const std::size_t block = ceil_div(kBytesPerPoll / element, per_line) * per_line;
  const auto part = [&](int64_t first, int64_t last) {
    const std::size_t end = std::min<std::size_t>(n, last * per_line);
    for (std::size_t at = first * per_line; at < end && group().can_run(); at += block)
      run(rows, at, std::min(end, at + block));
  };
  const auto all = static_cast<int64_t>(lines);
  if (parallel_for_)
    parallel_for_(all, static_cast<int64_t>(grain), part);
  else
    part(0, all);
}

// Returns the size of an element of the instruction's operand.
std::size_t ShmTransport::item_of(const Instruction& instruction, std::size_t operand) const {
  return instruction.operands[operand].where == OperandBuffer::partial ? row_->accumulator_item()
                                                                       : row_->item();
}

void ShmTransport::run(const Rows& rows, std::size_t begin, std::size_t end) const {
  const std::size_t operands = rows.instruction().operands.size();
  std::array<void*, kMostOperands> at;
  for (std::size_t i = rows.find(begin); begin < end; ++i) {
    const Rows::RowView row = rows[i];
    const std::size_t skipped = begin - row.begin, n = std::min(end, row.begin + row.count) - begin;
    for (std::size_t k = 0; k < operands; ++k)
      at[k] = static_cast<std::byte*>(row.at[k]) + skipped * item_of(rows.instruction(), k);
    run(rows.instruction(), at.data(), n);
    begin += n;
  }
}

// Results for staging buffers are folded into another destination first and copied from there while
// they are in the L1 cache. memcpy takes over whole lines that a peer has read without reading
// them, which the stores of a fold cannot. Between two cores this was 1.8 times as fast.
void ShmTransport::run(const Instruction& instruction, void* const* at, std::size_t count) const {
  const int dsts = instruction.dsts, srcs = static_cast<int>(instruction.operands.size()) - dsts;
  const int first = dsts - instruction.in_staging;
  const cpu::Pointers from{at + dsts, srcs};
  if (instruction.partial_dsts || instruction.partial_srcs > 0)
    return row_->run_accumulators(instruction.finishes, {at, dsts}, instruction.partial_dsts, from,
                                  instruction.partial_srcs, count);
  if (srcs == 1 || first == 0 || first == dsts)
    return row_->run(instruction.finishes, {at, dsts}, from, count,
                     non_temporal_ && instruction.in_staging == 0);
  const std::size_t item = row_->item(), block = kBlock / item;
  std::array<void*, kMostOperands> part;
  for (std::size_t done = 0; done < count; done += block) {
    const std::size_t some = std::min(block, count - done);
    for (std::size_t i = 0; i < instruction.operands.size(); ++i)
      part[i] = static_cast<std::byte*>(at[i]) + done * item;
    row_->run(instruction.finishes, {part.data(), first}, {part.data() + dsts, srcs}, some, false);
    for (int d = first; d < dsts; ++d) std::memcpy(part[d], part[0], some * item);
  }
}

}  // namespace pycollect::ipc
