// Selects (and caches) the rank program for a request, and checks that the two are compatible.
#pragma once
#include "../plan/select.h"
#include "executor.h"
#include "rank_program.h"

namespace pycollect::ipc {

struct WorldMember {
  Rank rank;
  int world;
  const Hosts* hosts;  // null: one host
};
struct SizeAndTopology {
  std::size_t bytes;  // of one rank's largest buffer; 0 where a rank cannot know it
  Topology topology;
  std::size_t staging_bytes;  // of one rank's staging buffer
  bool keeps_order;           // see SelectionKey
};

// Returns the rank program of the algorithm that the request names, or else of the selector's
// choice. Each thread caches its last choice: a look-up takes a fourth of a small call's time.
const RankProgram& program_for(const WorldMember& me, const CollectiveRequest& request,
                               const SizeAndTopology& key);

// Throws std::invalid_argument if the request is irregular and the program needs equal blocks.
void check_sizes_known(const CollectiveRequest& request, const RankProgram& rank_program);

FoldOptions fold_options(const CollectiveRequest& request, int world);

}  // namespace pycollect::ipc
