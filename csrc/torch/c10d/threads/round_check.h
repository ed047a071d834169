// Checks that all ranks make the same calls, with the fingerprints and the messages of processes.
#pragma once
#include <vector>

#include "thread_group.h"

namespace pycollect::dist {

// `calls` is indexed [rank]; `number` is the number of the round. Throws std::invalid_argument if
// the calls differ, or a rank has refused.
void check_round(const std::vector<const RankCalls*>& calls, uint64_t number);

}  // namespace pycollect::dist
