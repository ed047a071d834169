// Runs a plan on symbols instead of numbers, which proves the final content of every chunk and the
// order of its additions. No memory, no dtype, no executor.
#pragma once
#include <string>
#include <vector>

#include "registry.h"

namespace pycollect {

struct Verification {
  std::string defect;  // describes the first error of the plan; empty if there is none
  Order order = Order::exact;
  bool right() const { return defect.empty(); }
};

// Checks that the plan does what the collective promises, and whether its additions are those of a
// fold in this order: `native` and `exact` are named after the left fold, and mean the same of the
// tree.
Verification verify(Collective collective, const Plan& plan, Rank root, bool in_place,
                    FoldOrder order = FoldOrder::rank);

// Returns, per step, whether it is a fold whose result contains every rank's data, so that nothing
// is added to it afterwards.
std::vector<bool> finishes(const Plan& plan, bool in_place);

}  // namespace pycollect
