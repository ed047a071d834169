// A compiled plan bound to memory: the input of every executor, for any kind of memory.
#pragma once
#include <cstddef>
#include <vector>

#include "compiled_plan.h"
#include "dtype.h"
#include "offsets.h"

namespace pycollect {

// One buffer of one rank: `Binding::rows` rows, each `pitch` bytes after the last.
struct Memory {
  std::byte* base = nullptr;
  std::ptrdiff_t pitch = 0;
  bool pageable = false;  // host memory that no GPU should touch
};

// Memory for one run of the plan. A chunk along an inner dimension is a rectangle: the plan runs on
// every row alike. Several tensors in one call are several bindings.
struct Binding {
  const Offsets* offsets;
  std::vector<Memory> memory;  // [rank][buffer]
  std::size_t rows = 1;
};

struct BoundPlan {
  const CompiledPlan& compiled;
  const std::vector<Binding>& bindings;
  DType dtype;
  ReduceOp op;
  FoldOptions options;
};

// `elements`: the number of elements that a step moves in one binding, over all rows. `operands`:
// the number of pointers that the step follows per element.
inline std::size_t elements(const Binding& binding, const Step& step) {
  return binding.offsets->count(step.dsts[0]) * binding.rows;
}
inline std::size_t operands(const Step& step) { return step.dsts.size() + step.srcs.size(); }

// The address at which a slice begins in the first row of the binding.
inline std::byte* address(const Binding& binding, const Slice& s, std::size_t item_bytes) {
  const Memory& m = binding.memory[s.rank * kBuffers + static_cast<int>(s.buffer)];
  return m.base + binding.offsets->begin(s) * item_bytes;
}
inline std::ptrdiff_t pitch(const Binding& binding, const Slice& s) {
  return binding.memory[s.rank * kBuffers + static_cast<int>(s.buffer)].pitch;
}

}  // namespace pycollect
