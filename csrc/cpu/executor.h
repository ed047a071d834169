// Runs a compiled plan in one process on host memory: level after level, each cut by elements over
// the threads that `parallel_for` gives. Knows nothing of torch: csrc/torch hands the threads in.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "../plan/compiled.h"
#include "../plan/dtype.h"
#include "../plan/offsets.h"

namespace pycollect::cpu {

// One buffer of one rank: `Binding::rows` rows, each `pitch` bytes after the last.
struct Memory {
  std::byte* base = nullptr;
  std::ptrdiff_t pitch = 0;
};

// Memory for one run of the plan. A chunk along an inner dimension is a rectangle: the plan runs on
// every row alike. Several tensors in one call are several bindings.
struct Binding {
  const Offsets* offsets;
  std::vector<Memory> memory;  // [rank][buffer]
  std::size_t rows = 1;
};

// body(begin, end) for parts of [0, size), at least `grain` long, on any threads; returns when all
// ran.
using Body = std::function<void(int64_t, int64_t)>;
using ParallelFor = std::function<void(int64_t size, int64_t grain, const Body& body)>;

struct Call {
  const Compiled& compiled;
  const std::vector<Binding>& bindings;
  DType dtype;
  ReduceOp op;
  FoldOptions options;
};

void run(const Call& call, const ParallelFor& parallel_for);

// The specification: step after step in the written order, on one thread.
void run_in_order(const Call& call);

}  // namespace pycollect::cpu
