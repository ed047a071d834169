// A plan prepared for any number of runs: its program, its levels, and which of its steps complete
// a reduction (there `avg` divides). `compiled` keeps one for each algorithm, world size, root,
// number of pieces, level policy, and in place or not.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "program.h"
#include "registry.h"

namespace pycollect {

struct CompiledPlan {
  const Algorithm* algorithm;  // null for a plan that no registered algorithm made
  bool in_place;
  Plan plan;
  Program program;
  Levels levels;
  std::vector<bool> finishes;   // [step]: is it a fold whose result contains every rank's data?
  std::vector<bool> scratched;  // [rank]: does any step use the rank's scratch?
  std::vector<bool> staged;     // [rank]: does any step use the rank's host memory?
  std::size_t most_sources;     // of a step
  uint64_t id;                  // unique in this process: caches of derived data use it as the key
};

CompiledPlan compile(Plan plan, bool in_place, LevelPolicy level_policy = LevelPolicy::any,
                     const Algorithm* algorithm = nullptr);

// Returns the compiled plan from the cache, or compiles it. Thread-safe.
std::shared_ptr<const CompiledPlan> compiled(const Algorithm& algorithm,
                                             const AlgorithmParams& params, bool in_place,
                                             LevelPolicy level_policy = LevelPolicy::any);

}  // namespace pycollect
