// See step_runner.h. A small call must take only nanoseconds, so nothing here allocates unless a
// step has very many slices.
#include "step_runner.h"

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

}  // namespace pycollect::cpu
