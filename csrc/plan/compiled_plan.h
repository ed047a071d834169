// A plan prepared for any number of runs: its program, its levels, and which of its steps complete
// a reduction (there `avg` divides). The process has one cache of them, for all kinds of memory.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "program.h"
#include "registry.h"
#include "stage.h"

namespace pycollect {

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
  bool operator==(const PlanKey&) const = default;
};

// Returns the plan from the cache, which keeps it forever, or compiles it. Thread-safe.
const CompiledPlan& compiled(const PlanKey& key);

}  // namespace pycollect
