// The machine's NUMA nodes, and a rank's share of their cores. Memory of a segment lies on the node
// of the thread that commits it, so each rank commits its own part, and no page is ever moved.
// Ranks are not bound to nodes here: launchers do that, and a rank's threads inherit it.
#pragma once
#include <bitset>
#include <map>
#include <string>
#include <vector>

#include "../plan/plan.h"

namespace pycollect::ipc {

using CoreSet = std::bitset<1024>;  // as many cores as the C library's cpu_set_t

inline constexpr char kNodeFolder[] = "/sys/devices/system/node";

// Returns the cores of each node that has any, by the node's number; without such a folder,
// nothing.
using NumaNodes = std::map<int, CoreSet>;
NumaNodes numa_nodes(const std::string& folder = kNodeFolder);

// Returns how many cores the rank has for its folds: on each node where it may run, the node's
// cores divided among the ranks that may run there. At least 1; 0 if the nodes or the rank's cores
// (`cores[rank]`) are unknown. A rank that may run on some of a node's cores counts as one that may
// use all of them: often only its main thread is bound, to a single core, and OpenMP's are not.
int core_share(const NumaNodes& nodes, const std::vector<CoreSet>& cores, Rank rank);

}  // namespace pycollect::ipc
