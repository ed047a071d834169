// A plan over several hosts as its ranks run it: steps on the memory of one host each, and a copy
// for every transfer between hosts. For the analysis of plans: a rank runs its host's view.
#pragma once
#include "host_view.h"

namespace pycollect {

// Returns the host views of all hosts as one, with the ranks of the world. A transfer is a copy
// from the sender's cell to the receiver's, listed as a receive, and run by the receiving rank.
// Throws ValueError as `host_view` does.
HostView world_view(const Plan& staged, bool in_place, const Hosts& hosts, HostSenders senders);

}  // namespace pycollect
