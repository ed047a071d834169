// Passes, which rewrite a plan before `lower` finds the waits: with copies through host memory for
// ranks that do not reach each other's, and then with fewer steps and in a better order. Pure: the
// same values end in the same places, and executors need no special case.
#pragma once
#include <array>
#include <vector>

#include "offsets.h"
#include "plan.h"

namespace pycollect {

// Which rank reaches (can read and write) which memory. Every rank reaches host memory, that is
// `Buffer::host` and all buffers of ranks on the host, but slowly: copies use it, and folds use it
// only where a device has no room for a copy.
struct MemoryReach {
  std::vector<bool> on_host;  // [rank]: the rank's buffers are host memory; it runs no steps
  // [rank][of]: steps that `rank` runs reach the device memory of rank `of`.
  std::vector<std::vector<bool>> directly;
  // [buffer]: all ranks reach this buffer of every rank equally fast, as processes reach shared
  // memory. If `Buffer::host` is shared, folds read and write it directly, and a copy is run by its
  // destination's rank if that reaches the source.
  std::array<bool, kBuffers> shared = {};

  bool operator()(Rank rank, Rank of) const {
    return rank == of || on_host[of] || directly[rank][of];
  }
  bool shares_staging() const { return shared[static_cast<int>(Buffer::host)]; }
  auto operator<=>(const MemoryReach&) const = default;

  // Returns the reach of processes, which share scratch and host memory. `input`, `output`:
  // whether these buffers are shared, too.
  static MemoryReach processes(int world, bool input, bool output);
};

// The rank of an unreachable source first copies it out to its own host memory, once for all of its
// readers. The rank of an unreachable destination copies it in. A fold's slow sources are copied in
// before it as far as there is room: at the place of its result, and in scratch that the plan does
// not use. Ranks on a device run the steps of ranks on the host. A rank needs no more host memory
// than the size of its largest buffer.
//
// `pieces`: the number of parts into which every chunk is cut, one step each, so that copies out,
// copies in and folds can overlap; `lower` such a plan with `LevelPolicy::one_task`. Throws
// ValueError for a reach of another world size, or one in which every rank is on the host.
Plan stage(const Plan& plan, bool in_place, const MemoryReach& reach, int pieces = 1);

// Sets the chunk sizes of each rank's host memory to those of the chunks staged there, and checks
// all offsets. All other buffers are bound before. Throws ValueError if chunks of different sizes
// use the same place.
void cut_host_memory(const Plan& staged, PlanOffsets& offsets);

// The next two passes are for a plan staged for ranks that share memory.
//
// Removes copies of a slice onto itself. Where a rank folds and then copies the result elsewhere,
// lets the fold write both places, so that the copy does not read the result again.
Plan forward_copies(Plan plan, bool in_place);

// Moves to the front the steps with which a rank fills its own scratch and host memory from its own
// buffers, because these steps need no other rank. The order of all other steps is unchanged.
Plan hoist_local_copies(Plan plan, bool in_place);

// Returns the plan that processes run: staged, merged and ordered. `input`, `output`: every process
// reaches these buffers of every other one.
Plan for_processes(const Plan& plan, bool in_place, bool input, bool output);

}  // namespace pycollect
