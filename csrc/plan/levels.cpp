// Sorts the tasks of a program by level. Tasks of one level may run at the same time, because two
// tasks with conflicting accesses never have the same level. Running one level after the other
// satisfies all waits, because a task waits only for tasks of lower levels. `lower` computes the
// levels: the waits do not determine them, as there are none between tasks of one rank.
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
