// Runs a compiled plan in one process on host memory: level after level, each split by elements
// among the threads of `parallel_for`; and the folds and copies of a step, also for ranks that are
// processes. Does not depend on torch: csrc/torch passes the threads in.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "../plan/compiled_plan.h"
#include "fold.h"

namespace pycollect::cpu {

// Calls body(begin, end) for parts of [0, size), at least `grain` long, on any threads; returns
// when all calls have returned.
using Body = std::function<void(int64_t, int64_t)>;
using ParallelFor = std::function<void(int64_t size, int64_t grain, const Body& body)>;

void run(const BoundPlan& call, const ParallelFor& parallel_for);

// Reference execution, the specification: step after step in written order, on one thread.
void run_in_order(const BoundPlan& call);

// A range of a step's elements, numbered consecutively through all rows.
struct Range {
  std::size_t begin, end;
};

// Runs the folds and copies of a call on plain pointers, one row at a time.
class RowRunner {
 public:
  // Throws TypeError for a reduction that the type does not have.
  RowRunner(DType dtype, ReduceOp op, const FoldOptions& options);

  // `finishes`: the step completes the reduction. `non_temporal`: the result will not be read soon;
  // ignored in place.
  void run(bool finishes, Pointers dsts, Pointers srcs, std::size_t count,
           bool non_temporal) const {
    if (options_.widens) [[unlikely]]
      return run_accumulators(finishes, dsts, true, srcs, 0, 0, count);
    if (srcs.n == 1) return copy(dsts, srcs.at[0], count * item_, non_temporal);
    const Fold fold = finishes ? finishing_ : partial_;
    if (non_temporal) [[unlikely]]
      return stream(fold, dsts, srcs, count);
    fold(dsts, srcs, count, options_);
  }
  // The same if the first `partial_srcs` sources, or all destinations, are accumulators: see
  // AccumulatorFold.
  void run_accumulators(bool finishes, Pointers dsts, bool partial_dsts, Pointers srcs,
                        int partial_srcs, int before, std::size_t count) const;
  std::size_t item() const { return item_; }
  std::size_t dst_item() const { return options_.widens ? accumulator_item_ : item_; }
  std::size_t accumulator_item() const { return accumulator_item_; }

 private:
  void stream(Fold fold, Pointers dsts, Pointers srcs, std::size_t count) const;

  const std::size_t item_, accumulator_item_;
  const Fold finishing_, partial_;  // `avg` divides only in the step that completes it
  const DType dtype_;
  const ReduceOp op_;
  FoldOptions options_;
};

// Runs a range of a step of the plan on one binding's memory. `row` is of the plan's dtype and op.
// `non_temporal`: the level writes more than the caches hold. Ignored where this step, or probably
// a later one, reads the result.
void run_step(const RowRunner& row, const CompiledPlan& compiled, const Binding& binding, int step,
              Range range, bool non_temporal);

}  // namespace pycollect::cpu
