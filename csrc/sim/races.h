// Vector clocks: replays a program rank by rank behind its waits, without memory, and finds
// accesses to one chunk, one of them a write, that nothing orders. Proves as well that nobody waits
// for ever.
#pragma once
#include <cstdint>
#include <string>

#include "../plan/program.h"

namespace pycollect {

struct Replay {
  std::string defect;     // the first race, or who waits for whom for ever; empty when all is right
  int64_t races = 0;      // at least this many; none is none
  int64_t waits = 0;      // how many the program has
  bool deadlock = false;  // then nothing is said about what never ran
  bool meets = true;      // does every rank leave after all have entered?
};

// Throws ValueError for a program that names steps, ranks or tasks which are not there.
Replay replay(const Plan& plan, const Program& program, bool in_place);

}  // namespace pycollect
