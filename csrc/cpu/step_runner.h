// One step on one binding's memory: turns slices into pointers and hands them to the kernel. What
// every executor on host memory does with a step, whoever decides when.
#pragma once
#include <algorithm>
#include <cstddef>

#include "executor.h"
#include "fold.h"

namespace pycollect::cpu {

// A part of a step's elements, numbered through all rows.
struct Range {
  std::size_t begin, end;
};

// The arithmetic of a call on plain pointers, whoever found them.
class RowRunner {
 public:
  // Throws TypeMismatch for a reduction that the type does not have.
  RowRunner(DType dtype, ReduceOp op, const FoldOptions& options);

  // `finishes`: nothing is added to the result afterwards. `streamed`: nobody reads it soon;
  // ignored in place.
  void run(bool finishes, Pointers dsts, Pointers srcs, std::size_t count, bool streamed) const;
  std::size_t item() const { return item_; }

 private:
  const std::size_t item_;
  const Fold finishing_, partial_;  // `avg` scales only where nothing is added afterwards
  const FoldOptions options_;
};

class StepRunner {
 public:
  explicit StepRunner(const Call& call);

  // `streamed`: the level writes more than the caches hold. Ignored where this step, or probably a
  // later one, reads what is written.
  void run(const Binding& binding, int step, Range range, bool streamed) const;

 private:
  const Call& call_;
  const RowRunner row_;
};

}  // namespace pycollect::cpu
