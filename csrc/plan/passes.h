// Passes that optimize a plan staged for ranks that share memory: the same values in the same
// places, with fewer steps and in a better order. Pure; they run before `lower`.
#pragma once
#include "plan.h"

namespace pycollect {

// Removes copies of a slice onto itself. Where a rank folds and then copies the result elsewhere,
// lets the fold write both places, so that the copy does not read the result again.
Plan forward_copies(Plan plan, bool in_place);

// Moves to the front the steps with which a rank fills its own scratch and host memory from its own
// buffers, because these steps need no other rank. The order of all other steps is unchanged.
Plan hoist_local_copies(Plan plan, bool in_place);

// Returns the plan that processes run: staged, merged and ordered. `input`, `output`: every process
// reaches these buffers of every other one.
Plan for_processes(const Plan& plan, bool in_place, bool input, bool output);

}  // namespace pycollect
