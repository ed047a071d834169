// Which script a request is run by, for whoever runs scripts; and what must be right with the two.
#pragma once
#include "../plan/select.h"
#include "executor.h"
#include "script.h"

namespace pycollect::shm {

struct Scene {
  std::size_t bytes;  // of one rank's largest buffer; 0 where a rank cannot know it
  Ground ground;
};

// The algorithm that the request names, or else the selector's. From a cache: what was chosen last
// is known without a look at names, a fourth of a small call's time.
const Script& script_for(Rank rank, int world, const Request& request, const Scene& scene);

// Throws std::invalid_argument where the script takes all ranks' blocks to be alike.
void check_measured(const Request& request, const Script& script);

FoldOptions fold_options(const Request& request, int world);

}  // namespace pycollect::shm
