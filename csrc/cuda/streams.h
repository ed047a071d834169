// One process, several devices: levels become launches on in-order streams, and waits that cross
// streams become events. What to issue is computed once per plan and placement, and is data; it
// knows no device and no handle.
#pragma once
#include <vector>

#include "../plan/compiled.h"

namespace pycollect::cuda {

// Which stream a task goes to, by number. Several of a rank's may be one and the same: the fewer
// streams there are, the fewer events.
struct StreamIds {
  int caller;    // its buffers are ready when this gets there, and its own again behind it
  int worker;    // runs what the rank executes
  int sender;    // fills its memory on the host
  int receiver;  // copies into its memory what lies on a host
  bool operator==(const StreamIds&) const = default;
};
inline constexpr int kNoHub = -1;
struct StreamMap {
  std::vector<StreamIds> stream_ids;  // [rank]
  int streams;                        // how many; every number is below
  int hub = kNoHub;  // a stream that nothing else runs on, for joins of many with many
  bool operator==(const StreamMap&) const = default;
};

struct ScheduledLaunch {
  int stream;
  std::vector<TaskId> tasks;    // of one level; none on the hub
  std::vector<int> after = {};  // earlier issues on other streams, latest first
  bool recorded = false;        // somebody waits for this one
};
using Schedule = std::vector<ScheduledLaunch>;

// Every pair of conflicting accesses is ordered by streams and events, and no event is there that
// another one implies. Throws ValueError for a placement that is not one of this plan's.
Schedule schedule(const Compiled& compiled, const StreamMap& at);

}  // namespace pycollect::cuda
