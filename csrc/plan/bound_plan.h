// A plan on memory, BoundPlan: the input of every executor, for any kind of memory.
#pragma once
#include <cstddef>
#include <vector>

#include "compiled_plan.h"
#include "dtype.h"
#include "offsets.h"

namespace pycollect {

// One buffer of one rank: `Binding::rows` rows, each `pitch` bytes after the previous one.
struct BufferMemory {
  std::byte* base = nullptr;
  std::ptrdiff_t pitch = 0;
  bool pageable = false;  // host memory that no GPU should touch
};

// The memory of one tensor of every rank, for one run of the plan. If chunks divide an inner
// dimension, a chunk is a rectangle, and the plan runs on each of its rows in the same way. A call
// on several tensors has several bindings.
struct Binding {
  PlanOffsets offsets;
  std::vector<BufferMemory> memory;  // [rank][buffer]
  std::size_t rows = 1;
};

struct BoundPlan {
  const CompiledPlan& compiled;  // must outlive this, as those of the cache do
  DType dtype;
  ReduceOp op;
  FoldOptions options;
  std::vector<Binding> bindings = {};
};

// Returns the number of elements, over all rows, of each source and destination of the step.
inline std::size_t elements(const Binding& binding, const Step& step) {
  return binding.offsets.count(step.dsts[0]) * binding.rows;
}
// Returns the number of sources and destinations of the step.
inline std::size_t operands(const Step& step) { return step.dsts.size() + step.srcs.size(); }

// Returns the address of the slice in the first row; `pitch` bytes separate the rows.
inline std::byte* address(const Binding& binding, const Slice& s, std::size_t item_bytes) {
  const BufferMemory& m = binding.memory[s.rank * kBuffers + static_cast<int>(s.buffer)];
  return m.base + binding.offsets.begin(s) * item_bytes;
}
inline std::ptrdiff_t pitch(const Binding& binding, const Slice& s) {
  return binding.memory[s.rank * kBuffers + static_cast<int>(s.buffer)].pitch;
}

}  // namespace pycollect
