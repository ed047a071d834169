// Runs a collective of ranks that are threads of this process: the calls of all ranks become one
// call on a list of their tensors, in place. Copies nothing that the ranks' own copies would not.
#pragma once
#include <vector>

#include "../../../rank_threads/work_share.h"
#include "../group_call.h"

namespace pycollect::dist {

// `calls` has the calls of each rank, whose requests match; ranks may divide the same requests into
// calls differently. Throws what the call of a list throws.
void run_jointly(const std::vector<std::vector<GroupCall*>>& calls, rank_threads::WorkShare& share);

}  // namespace pycollect::dist
