// Sorts tasks into one bucket per level. Tasks of one level touch nothing in common, because a
// task's level is above that of every task it conflicts with. The levels of a rank's tasks never
// decrease, so its waits stay valid. `lower` computes the levels from all hazards, as the minimal
// set of waits does not determine them.
#include "program.h"

namespace pycollect {

Levels levels(const Program& program) {
  Levels result(program.empty() ? 0 : program[0].back().level + 1);
  for (Rank r = 0; r < static_cast<Rank>(program.size()); ++r)
    for (int i = 0; i < static_cast<int>(program[r].size()); ++i)
      result[program[r][i].level].push_back({r, i});
  return result;
}

}  // namespace pycollect
