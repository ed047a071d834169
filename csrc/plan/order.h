// Runs a plan on symbols instead of numbers: proves what every chunk ends up as and in which order
// it was added. No memory, no dtype, no executor.
#pragma once
#include <string>
#include <vector>

#include "registry.h"

namespace pycollect {

struct Verdict {
  std::string defect;  // the first thing that is wrong, in words; empty when all is right
  Order order = Order::exact;
  bool right() const { return defect.empty(); }
};

// Does the plan do what the collective promises, and in which order does it add?
Verdict verify(Collective collective, const Plan& plan, Rank root, bool in_place);

// [step]: is it a fold whose result has a leaf of every rank, so that nothing is added afterwards?
std::vector<bool> finishes(const Plan& plan, bool in_place);

}  // namespace pycollect
