// See executor.h. Small calls run step by step on the calling thread, and must take only
// nanoseconds, so nothing there allocates unless a step has very many slices. A level that moves
// enough bytes to pay for waking threads is split among all threads, by bytes moved.
#include "executor.h"

#include <algorithm>
#include <array>

#include "../plan/error.h"

namespace pycollect::cpu {
namespace {

// The addresses in one row of a step's destinations, then of its sources, and the distance in bytes
// of each to the next row.
class Cursors {
 public:
  explicit Cursors(std::size_t n) {
    if (n <= kFew) return;
    many_at_.resize(n);
    many_pitch_.resize(n);
    at_ = many_at_.data();
    pitch_ = many_pitch_.data();
  }

  // Bytes of an element: `dst_item` in destinations, `item` in sources.
  void start(const Binding& binding, const Step& step, std::size_t dst_item, std::size_t item) {
    dsts_ = step.dsts.size();
    dst_item_ = static_cast<std::ptrdiff_t>(dst_item);
    item_ = static_cast<std::ptrdiff_t>(item);
    for (const Slices* side : {&step.dsts, &step.srcs})
      for (const Slice& s : *side) {
        at_[size_] = address(binding, s, side == &step.dsts ? dst_item : item);
        pitch_[size_++] = pitch(binding, s);
      }
  }
  void move(std::size_t rows, std::ptrdiff_t elements) {
    for (std::size_t i = 0; i < size_; ++i)
      at_[i] = static_cast<std::byte*>(at_[i]) + pitch_[i] * static_cast<std::ptrdiff_t>(rows) +
               elements * (i < dsts_ ? dst_item_ : item_);
  }
  Pointers slice(std::size_t first, std::size_t n) const {
    return {at_ + first, static_cast<int>(n)};
  }

 private:
  static constexpr std::size_t kFew = 64;  // a step over 32 ranks
  std::array<void*, kFew> few_at_;
  std::array<std::ptrdiff_t, kFew> few_pitch_;
  std::vector<void*> many_at_;
  std::vector<std::ptrdiff_t> many_pitch_;
  void** at_ = few_at_.data();
  std::ptrdiff_t* pitch_ = few_pitch_.data();
  std::size_t size_ = 0, dsts_ = 0;
  std::ptrdiff_t dst_item_ = 0, item_ = 0;
};

// Returns whether no destination is a source. In place, streamed stores evict the data just read
// from the caches, which makes them three times as slow.
bool keeps_apart(Pointers dsts, Pointers srcs) {
  return std::none_of(dsts.at, dsts.at + dsts.n, [&](const void* dst) {
    return std::find(srcs.at, srcs.at + srcs.n, dst) != srcs.at + srcs.n;
  });
}

// A step that writes scratch is not streamed, because scratch is read soon.
bool writes_scratch(const Step& step) {
  return std::any_of(step.dsts.begin(), step.dsts.end(),
                     [](const Slice& s) { return s.buffer == Buffer::scratch; });
}

}  // namespace

RowRunner::RowRunner(DType dtype, ReduceOp op, const FoldOptions& options)
    : item_(item_bytes(dtype)),
      accumulator_item_(item_bytes(accumulator(dtype))),
      finishing_(find_fold(dtype, op, options.order)),
      partial_(find_fold(dtype, op == ReduceOp::avg ? ReduceOp::sum : op, options.order)),
      dtype_(dtype),
      op_(op),
      options_(options) {
  options_.non_temporal = false;
  require_type(finishing_ != nullptr, name(op), " is not defined for ", name(dtype));
}

void RowRunner::stream(Fold fold, Pointers dsts, Pointers srcs, std::size_t count) const {
  FoldOptions streaming = options_;
  streaming.non_temporal = keeps_apart(dsts, srcs);
  fold(dsts, srcs, count, streaming);
}

void RowRunner::run_accumulators(bool finishes, Pointers dsts, bool partial_dsts, Pointers srcs,
                                 int partial_srcs, int before, std::size_t count) const {
  if (srcs.n == 1 && partial_srcs == 1)
    return copy(dsts, srcs.at[0], count * accumulator_item_, false);
  const bool tree = options_.order == FoldOrder::tree && order_matters(dtype_, op_);
  if (!tree && accumulates_in_itself(dtype_)) return run(finishes, dsts, srcs, count, false);
  FoldOptions options = options_;
  if (!tree) options.order = FoldOrder::rank;
  AccumulatorFold(dtype_, op_)
      .run(finishes, dsts, partial_dsts, srcs, partial_srcs, before, count, options);
}

void run_step(const RowRunner& row, const CompiledPlan& compiled, const Binding& binding, int step,
              Range range, bool non_temporal) {
  if (range.begin >= range.end) return;
  const Step& s = compiled.plan.steps[step];
  const bool finishes = compiled.finishes[step];
  const std::size_t width = binding.offsets.count(s.dsts[0]);
  std::size_t from = 0, left = range.end - range.begin;
  Cursors cursors(operands(s));
  cursors.start(binding, s, row.dst_item(), row.item());
  if (range.begin > 0) {
    from = range.begin % width;
    cursors.move(range.begin / width, static_cast<std::ptrdiff_t>(from));
  }
  while (true) {
    const std::size_t n = std::min(width - from, left);
    row.run(finishes, cursors.slice(0, s.dsts.size()), cursors.slice(s.dsts.size(), s.srcs.size()),
            n, non_temporal && !writes_scratch(s));
    left -= n;
    if (left == 0) return;
    cursors.move(1, -static_cast<std::ptrdiff_t>(from));
    from = 0;
  }
}

namespace {

// A level that reads and writes fewer bytes runs on the calling thread: one thread moves 1 MiB in 3
// to 6 us, while passing a part to another thread costs 1 us if that spins and 35 us if it sleeps.
constexpr std::size_t kParallelBytes = 1 << 20;
// Fewest bytes for one thread: moving them takes about as long as passing them to the thread.
constexpr std::size_t kGrainBytes = kParallelBytes / 4;
// From about this size on no cache near the core keeps the result, and streamed stores are up to
// twice as fast. In place they are up to three times as slow: see RowRunner.
constexpr std::size_t kStreamedBytes = 16 << 20;
// Threads' parts begin at a multiple of this from a job's beginning, so that they share no line.
constexpr std::size_t kCacheLine = 64;

// One step on one binding's memory, with its range [begin, end) of the bytes that its level moves.
struct LevelJob {
  const Binding* binding;
  int step;
  std::size_t elements;   // in all rows
  std::size_t moved_per;  // bytes read and written for each element
  std::size_t begin, end;
};

struct Level {
  std::vector<LevelJob> jobs;
  std::size_t moved = 0, written = 0;
};

bool is_small(const BoundPlan& call) {
  std::size_t moved = 0;
  for (const Binding& binding : call.bindings)
    for (const Step& step : call.compiled.plan.steps) {
      moved += elements(binding, step) * item_bytes(call.dtype) * operands(step);
      if (moved >= kParallelBytes) return false;
    }
  return true;
}

void collect(const BoundPlan& call, const std::vector<TaskId>& places, Level& level) {
  level.jobs.clear();
  level.moved = level.written = 0;
  const std::size_t item = item_bytes(call.dtype);
  for (const TaskId& place : places) {
    const int at = call.compiled.program[place.rank][place.index].step;
    if (at == kAllBuffers) continue;
    const Step& step = call.compiled.plan.steps[at];
    for (const Binding& binding : call.bindings) {
      const std::size_t n = elements(binding, step);
      if (n == 0) continue;
      const std::size_t begin = level.moved;
      level.moved += n * item * operands(step);
      level.written += n * item * step.dsts.size();
      level.jobs.push_back({&binding, at, n, item * operands(step), begin, level.moved});
    }
  }
}

// The first element of the job in a part that begins at byte `at` of the level.
std::size_t cut(const LevelJob& job, std::size_t at, std::size_t per_line) {
  if (at <= job.begin) return 0;
  const std::size_t element = (at - job.begin) / job.moved_per;
  return std::min(job.elements, (element + per_line - 1) / per_line * per_line);
}

void run_level(const RowRunner& row, const BoundPlan& call, const Level& level,
               const ParallelFor& parallel_for, std::size_t per_line, bool non_temporal) {
  const auto part = [&](int64_t from, int64_t to) {
    const std::size_t begin = from, end = to;
    auto job = std::partition_point(level.jobs.begin(), level.jobs.end(),
                                    [&](const LevelJob& j) { return j.end <= begin; });
    for (; job != level.jobs.end() && job->begin < end; ++job)
      run_step(row, call.compiled, *job->binding, job->step,
               {cut(*job, begin, per_line), cut(*job, end, per_line)}, non_temporal);
  };
  if (level.moved < kParallelBytes)
    part(0, level.moved);
  else
    parallel_for(level.moved, kGrainBytes, part);
}

}  // namespace

void run_in_order(const BoundPlan& call) {
  const RowRunner row(call.dtype, call.op, call.options);
  for (std::size_t step = 0; step < call.compiled.plan.steps.size(); ++step)
    for (const Binding& binding : call.bindings)
      run_step(row, call.compiled, binding, step,
               {0, elements(binding, call.compiled.plan.steps[step])}, false);
}

void run(const BoundPlan& call, const ParallelFor& parallel_for) {
  if (is_small(call)) return run_in_order(call);
  const RowRunner row(call.dtype, call.op, call.options);
  const std::size_t per_line = std::max<std::size_t>(1, kCacheLine / item_bytes(call.dtype));
  Level level;
  for (const std::vector<TaskId>& places : call.compiled.levels) {
    collect(call, places, level);
    if (level.jobs.empty()) continue;
    const bool non_temporal = call.options.non_temporal && level.written >= kStreamedBytes;
    run_level(row, call, level, parallel_for, per_line, non_temporal);
  }
}

}  // namespace pycollect::cpu
