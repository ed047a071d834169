// Race detector with vector clocks: replays a program rank by rank, honouring its waits, without
// memory. Finds accesses to one chunk, at least one of them a write, that no wait orders. Also
// proves that no rank waits forever.
#pragma once
#include <cstdint>
#include <string>

#include "../plan/program.h"

namespace pycollect {

struct RaceReport {
  std::string defect;      // describes the first race or a wait that never ends; empty without one
  int64_t races = 0;       // lower bound of the number of races; 0 means that there is none
  int64_t waits = 0;       // number of waits of the program
  bool deadlock = false;   // if true, tasks that never ran are not checked for races
  bool is_barrier = true;  // true if every rank leaves after all ranks have entered
};

// Throws ValueError for a program that names steps, ranks or tasks that do not exist.
RaceReport find_races(const Plan& plan, const Program& program, bool in_place);

}  // namespace pycollect
