// Makes a plan of copies through host memory out of one whose ranks do not reach each other. A pure
// pass before `lower`, which then finds the waits: no executor knows of it.
#pragma once
#include <array>
#include <vector>

#include "offsets.h"
#include "plan.h"

namespace pycollect {

// Who can touch whose memory. Host memory, that of ranks and `Buffer::host` alike, is reached by
// everybody, but slowly: copies go there, and folds only where there is no room to copy to.
struct Reach {
  std::vector<bool> on_host;  // [rank]: its memory is the host's; it executes nothing
  std::vector<std::vector<bool>>
      directly;  // [rank][of]: what the rank runs may touch `of`'s memory
  // [buffer]: everybody's, as near to everybody as its own: processes that share memory. If the
  // memory on the host is, folds read and write it, and a copy is made by whom it is for.
  std::array<bool, kBuffers> shared = {};
  // A copy to several is made by whoever runs the step, for all at once, if it reaches all of it:
  // for ranks that work by turns anyway, whose copies side by side would only read the source more
  // often.
  bool at_once = false;

  bool operator()(Rank rank, Rank of) const {
    return rank == of || on_host[of] || directly[rank][of];
  }
  bool near() const { return shared[static_cast<int>(Buffer::host)]; }

  // Ranks that are processes: all share their scratch and host memory, and the sides that are said.
  static Reach processes(int world, bool input, bool output, bool at_once);
};

// A source out of reach is first copied out by its own rank to that rank's memory on the host, once
// however many read it; a destination out of reach is copied in by its own rank. A fold's slow
// sources are copied in before it as far as there is room: where its result will be, and in scratch
// that the plan leaves alone. Steps of ranks on the host are given to others. A rank needs no more
// host memory than its largest buffer has.
//
// `pieces`: cut every chunk in so many, one step each, so that copies out, copies in and folds can
// overlap; `lower` such a plan with `Pace::one_task`. Throws ValueError for a reach that is not of
// this plan's world, or in which every rank is on the host.
Plan stage(const Plan& plan, bool in_place, const Reach& reach, int pieces = 1);

// Cuts each rank's memory on the host as what is staged there is cut, when everything else has been
// bound, and checks the whole. Throws ValueError if chunks of unlike sizes take turns in one place.
void cut_host_memory(const Plan& staged, Offsets& offsets);

}  // namespace pycollect
