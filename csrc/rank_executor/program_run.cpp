// See program_run.h. A late rank that finds the group aborted stops soon and throws; it never
// returns success. The path of a small call allocates no memory.
#include "program_run.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "../plan/error.h"

namespace pycollect::ipc {
namespace {

// Below this many bytes read and written, the calling thread works alone; no thread gets less than
// a quarter of this. cpu/executor.cpp has the measurement.
constexpr std::size_t kParallelBytes = 1 << 20;
constexpr std::size_t kBlock = 16 << 10;  // half of a core's L1 data cache
// How many bytes a thread reads and writes between two polls of the abort state: about half a
// millisecond. A poll is a load from a line that no rank writes while the group is healthy.
constexpr std::size_t kBytesPerPoll = 4 << 20;
constexpr std::size_t kLine = 64;
// Operands of a fold over the ranks of one host, in most programs.
constexpr int kFewOperands = 32;

std::size_t ceil_div(std::size_t n, std::size_t by) { return (n + by - 1) / by; }

}  // namespace

void ProgramRun::begin(const PreparedRequest& prepared, const CollectiveRequest& request,
                       const OpContext& context) {
  prepared_ = &prepared;
  bound_ = &*prepared.in_buffers;
  context_ = &context;
  buffers_ = {&request.input, &request.output};
  is_scattered_ = request.input.spans.size() > 1 || request.output.spans.size() > 1;
  for (int i = 0; is_scattered_ && i < 2; ++i) {
    ends_[i].clear();
    std::size_t end = 0;
    for (const BufferSpan& s : buffers_[i]->spans)
      ends_[i].push_back(end += s.count * prepared.item());
  }
  pieces_ = bound_->pieces;
  filled_ = 0;
  in_tensors_ = false;
  staged_ = nullptr;
  is_trial_ = non_temporal_ = false;
  if (!prepared.chooses_stores) return;
  is_trial_ = prepared.stores.is_trial();
  non_temporal_ = prepared.stores.is_non_temporal();
  took_ = {};
}

void ProgramRun::use_tensors() {
  bound_ = &*prepared_->in_tensors;
  in_tensors_ = true;
  is_trial_ = non_temporal_ = false;
  pieces_ = bound_->pieces;
}

inline void ProgramRun::begin_piece(uint64_t run, std::size_t from) {
  const std::size_t skipped = from * prepared_->item();
  run_ = run;
  from_ = from;
  for (const uint32_t own : {OperandPlace::kInput, OperandPlace::kOutput})
    if (const auto& of = buffers_[own]->spans; !of.empty() && of[0].base != nullptr)
      bases_[own] = of[0].base + skipped;
  std::byte** of_rank = &bases_[OperandPlace::kOfRanks];
  std::byte* staging = group_.entry(0, context_->call).data.data();
  std::size_t step = sizeof(RankState);
  if (!bound_->in_entry) {
    staging = group_.staging_buffer(0, run);
    step = group_.layout().staging_step();
    // Consecutive runs use different buffers, so a run and the next but one use different slots.
    if (bound_->slots > 1) staging += run / 2 % bound_->slots * bound_->slot_bytes;
    staged_ = staging;
  }
  const int world = group_.world();
  for (Rank r = 0; r < world; ++r, staging += step, of_rank += OperandPlace::kBasesOfRank) {
    of_rank[0] = staging;
    if (!in_tensors_) continue;
    const RegisteredOffsets& registered = group_.entry(r, context_->call).registered;
    of_rank[1] = group_.heap(r) + registered.input + skipped;
    of_rank[2] = group_.heap(r) + registered.output + skipped;
  }
}

int ProgramRun::fill(uint64_t run) {
  const RankProgram& program = bound_->program;
  begin_piece(run, 0);
  if (is_trial_) [[unlikely]]
    took_ -= Clock::now().time_since_epoch();
  for (; filled_ < program.prologue; ++filled_)
    move(program.instructions[filled_], count_of(filled_));
  if (is_trial_) [[unlikely]] {
    std::atomic_thread_fence(std::memory_order_seq_cst);  // the stores have left the core
    took_ += Clock::now().time_since_epoch();
  }
  group_.require_run(*context_);  // a call may consist of a prologue alone
  return program.tasks_after_prologue();
}

// The end of a call's last run need not be signalled unless a peer waits for the last instruction:
// the next call's fingerprint signals it, too.
void ProgramRun::run(uint64_t first) {
  const RankProgram& program = bound_->program;
  if (is_trial_) [[unlikely]]
    took_ -= Clock::now().time_since_epoch();
  for (uint32_t k = 0; k < pieces_.count; ++k) {
    if (k > 0 || filled_ == 0) begin_piece(first + k, k * pieces_.elements);
    if (k > 0 && bound_->stride > 0) group_.await_peers(at_run(run_ - 1), *context_);
    if (k > 0 && program.entry_awaited) group_.advance(at_run(run_) + 1);
    run_piece(std::exchange(filled_, 0));
    const uint64_t end = at_run(run_ + 1);
    if (k + 1 < pieces_.count || program.end_awaited)
      group_.advance(end);
    else
      group_.own_state().ended.store(end, std::memory_order_release);
  }
  if (is_trial_) [[unlikely]]
    prepared_->stores.measured(non_temporal_, took_ + Clock::now().time_since_epoch());
  if (prepared_->chooses_stores) prepared_->stores.next();
}

inline void ProgramRun::run_piece(std::size_t skip) {
  const RankProgram& program = bound_->program;
  for (std::size_t i = skip; i < program.instructions.size(); ++i) {
    const Instruction& instruction = program.instructions[i];
    wait(instruction.waits);
    perform(i, instruction);
    if (instruction.signals) group_.advance(at_run(run_) + instruction.finished_tasks);
  }
  wait(program.exit);
}

inline void ProgramRun::perform(std::size_t i, const Instruction& instruction) {
  const std::size_t n = count_of(i);
  if (n == 0) return;
  move(instruction, n);
  std::atomic_thread_fence(std::memory_order_acquire);  // after the reads of peers' memory
  group_.require_run(*context_);
}

inline void ProgramRun::move(const Instruction& instruction, std::size_t n) const {
  const std::size_t element = prepared_->item() * instruction.operand_count();
  if (n * element >= kParallelBytes) return move_parallel(instruction, n, element);
  move_spans(instruction, 0, n);
}

// Each thread stops early when the group is aborted; the calling thread throws afterwards.
void ProgramRun::move_parallel(const Instruction& instruction, std::size_t n,
                               std::size_t element) const {
  const std::size_t per_line = kLine / prepared_->item(), lines = ceil_div(n, per_line);
  const std::size_t grain =
      std::max<std::size_t>(1, lines / ceil_div(n * element, kParallelBytes / 4));
  const std::size_t block = ceil_div(kBytesPerPoll / element, per_line) * per_line;
  const auto part = [&](int64_t first, int64_t last) {
    const std::size_t end = std::min<std::size_t>(n, last * per_line);
    for (std::size_t at = first * per_line; at < end && group_.can_run(); at += block)
      move_spans(instruction, at, std::min(end, at + block));
  };
  if (parallel_for_)
    parallel_for_(static_cast<int64_t>(lines), static_cast<int64_t>(grain), part);
  else
    part(0, static_cast<int64_t>(lines));
  group_.require_run(*context_);
}

inline void ProgramRun::move_spans(const Instruction& instruction, std::size_t begin,
                                   std::size_t end) const {
  if (instruction.operand_count() <= kFewOperands) [[likely]]
    move_spans<kFewOperands>(instruction, begin, end);
  else
    move_spans<kMostOperands>(instruction, begin, end);
}

// Moves the elements [begin, end) of the instruction's part of the current piece: in spans, each as
// long as no operand continues in another tensor.
template <int kMost>
void ProgramRun::move_spans(const Instruction& instruction, std::size_t begin,
                            std::size_t end) const {
  std::array<void*, kMost> at;
  const OperandPlace* const places = bound_->places.data() + instruction.first_operand;
  const int operands = instruction.operand_count();
  while (begin < end) {
    std::size_t n = end - begin;
    int i = 0;  // no instruction is without operands
    do at[i] = address(places[i], begin, n);
    while (++i < operands);
    fold(instruction, at.data(), n);
    begin += n;
  }
}

// Returns the address of the operand's element `at` in the current piece, and limits `n` to the
// elements before the next tensor.
inline std::byte* ProgramRun::address(const OperandPlace& place, std::size_t at,
                                      std::size_t& n) const {
  if (is_scattered_ && place.is_own() && n > 0) [[unlikely]]
    return find(place, at, n);
  return bases_[place.base] + place.offset + at * place.item;
}

std::byte* ProgramRun::find(const OperandPlace& place, std::size_t at, std::size_t& n) const {
  const std::vector<std::size_t>& ends = ends_[place.base];
  const std::size_t position = place.offset + (from_ + at) * place.item;
  const auto i = std::upper_bound(ends.begin(), ends.end(), position) - ends.begin();
  n = std::min(n, (ends[i] - position) / place.item);
  return buffers_[place.base]->spans[i].base + (position - (i == 0 ? 0 : ends[i - 1]));
}

inline void ProgramRun::fold(const Instruction& instruction, void* const* at,
                             std::size_t count) const {
  const cpu::RowRunner& row = prepared_->row;
  const int dsts = instruction.dsts, staged = instruction.in_staging;
  const cpu::Pointers to{at, dsts}, from{at + dsts, instruction.srcs};
  if (instruction.is_plain) [[likely]]
    row.run(instruction.finishes, to, from, count,
            staged == 0 ? prepared_->non_temporal : staged == dsts && non_temporal_);
  else
    fold_and_copy(instruction, to, from, count);
}

// Results for staging buffers are folded into another destination first and copied from there while
// they are in the L1 cache. memcpy takes over whole lines that a peer has read without reading
// them, which the stores of a fold cannot. Between two cores this was 1.8 times as fast.
void ProgramRun::fold_and_copy(const Instruction& instruction, cpu::Pointers to, cpu::Pointers from,
                               std::size_t count) const {
  const cpu::RowRunner& row = prepared_->row;
  const int first = to.n - instruction.in_staging;
  const std::size_t item = row.item(), block = kBlock / item;
  std::array<void*, kMostOperands> part;
  for (std::size_t done = 0; done < count; done += block) {
    const std::size_t some = std::min(block, count - done);
    for (int i = 0; i < to.n + from.n; ++i)
      part[i] = static_cast<std::byte*>(to.at[i]) + done * item;
    row.run(instruction.finishes, {part.data(), first}, {part.data() + to.n, from.n}, some, false);
    cpu::copy({part.data() + first, to.n - first}, part[0], some * item, non_temporal_);
  }
}

}  // namespace pycollect::ipc
