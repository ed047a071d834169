// Runs a plan on symbols instead of numbers, which proves the final content of every chunk and the
// order of its additions. No memory, no dtype, no executor.
#pragma once
#include <string>
#include <vector>

#include "host_view.h"
#include "registry.h"

namespace pycollect {

struct Verification {
  std::string defect;  // describes the first error of the plan; empty if there is none
  Order order = Order::exact;
  bool right() const { return defect.empty(); }
};

// Checks that the plan does what the collective promises, and finds the order of its additions.
Verification verify(Collective collective, const Plan& plan, Rank root, bool in_place);

// Describes the first step that does more between hosts than to copy to the rank that runs it;
// returns an empty text if there is none.
std::string find_fold_between_hosts(const Plan& plan, const Hosts& hosts);

// Checks the view of a world of several hosts (see world_view), and also that every step stays on
// one host, except for copies, which are all that passes between hosts.
Verification verify(Collective collective, const HostView& view, const Hosts& hosts, Rank root,
                    bool in_place);

// Returns, per step, whether it is a fold whose result contains every rank's data, so that nothing
// is added to it afterwards.
std::vector<bool> finishes(const Plan& plan, bool in_place);

}  // namespace pycollect
