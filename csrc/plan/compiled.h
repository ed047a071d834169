// A plan that is ready to run any number of times: lowered, cut in levels, and with each step
// marked that finishes a reduction (where `avg` scales). Computed once per key and kept.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "program.h"
#include "registry.h"

namespace pycollect {

struct Compiled {
  const Algorithm* algorithm;  // null for a plan from elsewhere
  bool in_place;
  Plan plan;
  Program program;
  Levels levels;
  std::vector<bool> finishes;   // [step]: a fold whose result has a leaf of every rank
  std::vector<bool> scratched;  // [rank]: does any step touch the rank's scratch?
  std::vector<bool> staged;     // [rank]: and its memory on the host?
  uint64_t id;                  // no other one ever has it: what is derived from this is kept by it
};

Compiled compile(Plan plan, bool in_place, Pace pace = Pace::any,
                 const Algorithm* algorithm = nullptr);

// From the cache, or made now. Thread-safe.
std::shared_ptr<const Compiled> compiled(const Algorithm& algorithm, const Ask& ask, bool in_place,
                                         Pace pace = Pace::any);

}  // namespace pycollect
