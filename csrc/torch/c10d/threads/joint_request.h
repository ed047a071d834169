// The matching requests of ranks that are threads of this process, as a plan on their memory.
#pragma once
#include <vector>

#include "../../../rank_executor/request.h"
#include "../../list_call.h"

namespace pycollect::dist {

using RankRequests = std::vector<const ipc::CollectiveRequest*>;  // [rank]

// Adds the plan of the requests and its bindings to the call.
void bind_jointly(const RankRequests& requests, ListCall& call);

}  // namespace pycollect::dist
