// Rewrites a plan for ranks that do not reach each other's memory, with copies through host memory.
// A pure pass before `lower`, which then finds the waits; executors need no special case for it.
#pragma once
#include <array>
#include <vector>

#include "offsets.h"
#include "plan.h"

namespace pycollect {

// Reachability: which rank can touch which memory. Every rank reaches host memory (that of ranks on
// the host, and `Buffer::host`), but slowly: copies use it, and folds only where there is no room
// for a copy.
struct Reachability {
  std::vector<bool> on_host;  // [rank]: its memory is the host's; it executes nothing
  std::vector<std::vector<bool>>
      directly;  // [rank][of]: the rank's steps may touch the memory of rank `of`
  // [buffer]: memory that all ranks share and reach equally fast, as processes with shared memory.
  // If `Buffer::host` is shared, folds read and write it, and each destination's rank copies.
  std::array<bool, kBuffers> shared = {};
  // The rank that runs a step with several destinations copies to all of them at once if it reaches
  // them. For ranks that run by turns anyway: separate copies would only read the source
  // repeatedly.
  bool push_to_all = false;

  bool operator()(Rank rank, Rank of) const {
    return rank == of || on_host[of] || directly[rank][of];
  }
  bool shares_staging() const { return shared[static_cast<int>(Buffer::host)]; }

  // For processes, which share scratch and host memory; `input`, `output`: these are shared, too.
  static Reachability processes(int world, bool input, bool output, bool push_to_all);
};

// The rank of an unreachable source first copies it out to its own host memory, once for all of its
// readers. The rank of an unreachable destination copies it in. A fold's slow sources are copied in
// before it as far as there is room: at the place of its result, and in scratch that the plan does
// not use. Other ranks run the steps of ranks on the host. A rank needs no more host memory than
// the size of its largest buffer.
//
// `pieces`: the number of parts into which every chunk is cut, one step each, so that copies out,
// copies in and folds can overlap; `lower` such a plan with `LevelPolicy::one_task`. Throws
// ValueError for a reach of another world size, or one in which every rank is on the host.
Plan stage(const Plan& plan, bool in_place, const Reachability& reach, int pieces = 1);

// Sets the chunk sizes of each rank's host memory to those of the chunks staged there, and checks
// all offsets. All other buffers are bound before. Throws ValueError if chunks of different sizes
// use the same place.
void cut_host_memory(const Plan& staged, Offsets& offsets);

}  // namespace pycollect
