// A plan prepared for any number of runs, and bound to the memory of one. The process has one cache
// of compiled plans, for all kinds of memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "dtype.h"
#include "offsets.h"
#include "passes.h"
#include "program.h"
#include "registry.h"

namespace pycollect {

// A plan with its program, its levels, and which of its steps complete a reduction (there `avg`
// divides).
struct CompiledPlan {
  bool in_place;
  Plan plan;
  Program program;
  Levels levels;
  std::vector<bool> finishes;   // [step]: is it a fold whose result contains every rank's data?
  std::vector<bool> scratched;  // [rank]: does any step use the rank's scratch?
  std::vector<bool> staged;     // [rank]: does any step use the rank's host memory?
  bool needs_memory;            // does any rank use scratch or host memory?
  std::size_t most_sources;     // of a step
  uint64_t id;                  // unique in this process: caches of derived data use it as the key
};

CompiledPlan compile(Plan plan, bool in_place, LevelPolicy level_policy = LevelPolicy::any);

// A plan of the cache: what it is for.
struct PlanKey {
  const Algorithm* algorithm;
  int world;
  Rank root;
  int pieces;
  bool in_place;
  // None: the ranks share all memory. Else the plan has copies through the host, see `stage`, whose
  // pieces overlap.
  std::optional<MemoryReach> reach = {};
  auto operator<=>(const PlanKey&) const = default;
};

// Returns the plan from the cache, which keeps it forever, or compiles it. Thread-safe.
const CompiledPlan& compiled(const PlanKey& key);

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

// A plan on memory: the input of every executor, for any kind of memory.
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
