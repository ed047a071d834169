// Passes over a plan that has been staged for ranks that share memory: the same values in the same
// places, with fewer steps and in a better order. Pure, and before `lower`.
#pragma once
#include "plan.h"

namespace pycollect {

// Leaves out what copies a slice onto itself, and where a rank folds and then copies the result
// elsewhere lets the fold write both, so that the result is never read again for it.
Plan merge_copies(const Plan& plan, bool in_place);

// Moves to the front what a rank can do without the others and only for them: filling its own
// scratch and host memory from its own buffers. Nobody else's order changes.
Plan fill_first(const Plan& plan, bool in_place);

// What processes run: staged, merged and ordered. `input`, `output`: everybody reaches everybody's;
// `at_once`: see Reach.
Plan for_processes(const Plan& plan, bool in_place, bool input, bool output, bool at_once = false);

}  // namespace pycollect
