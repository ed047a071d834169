// Runs one step of a plan on host memory: the executor of one process finds the addresses of its
// slices in a Binding, which is the memory of one run; a rank that is a process has its own.
#pragma once
#include <algorithm>
#include <cstddef>

#include "executor.h"
#include "fold.h"

namespace pycollect::cpu {

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
