// The calls of ranks that are threads of this process: whether all ranks make the same ones, and
// their run.
#pragma once
#include <vector>

#include "../../../rank_threads/loop_share.h"
#include "thread_group.h"

namespace pycollect::dist {

// Checks that all ranks make the same calls, with the fingerprints and the messages of processes.
// `calls` is indexed [rank]; `number` is the number of the joint call. Throws std::invalid_argument
// if the calls differ, or a rank has refused.
void check_joint_call(const std::vector<const PostedCalls*>& calls, uint64_t number);

// Runs a collective: the calls of all ranks become one call on a list of their tensors, in place.
// Copies nothing that the ranks' own copies would not. `calls` has the calls of each rank, whose
// requests match; ranks may divide the same requests into calls differently. Throws what the call
// of a list throws.
void run_jointly(const std::vector<std::vector<GroupCall*>>& calls, rank_threads::LoopShare& share);

}  // namespace pycollect::dist
