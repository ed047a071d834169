// Schedules for one process with several devices: the levels of a plan become launches on streams,
// and waits between streams become events. A schedule is data, computed once per plan and stream
// map, without devices or handles.
#pragma once
#include <vector>

#include "../plan/compiled_plan.h"

namespace pycollect::cuda {

// The streams of a rank's tasks, by number. Several may be the same stream: fewer streams need
// fewer events.
struct RankStreamIds {
  int caller;  // runs the rank's first and last task (see Program), folds and other copies
  int d2h;     // runs copies to the rank's host memory
  int h2d;     // runs copies from host memory to the rank's memory
  auto operator<=>(const RankStreamIds&) const = default;
};
struct StreamMap {
  std::vector<RankStreamIds> stream_ids;  // [rank]
  int streams;                            // number of streams
  auto operator<=>(const StreamMap&) const = default;
};

// The tasks of one level on one stream, with the waits before them.
struct ScheduledLaunch {
  int stream;
  std::vector<TaskId> tasks;
  std::vector<int> after = {};  // launches on other streams to wait for, latest first
  bool recorded = false;  // an event is recorded after the launch: another stream waits for it
};
using Schedule = std::vector<ScheduledLaunch>;

// Returns a schedule that orders every pair of conflicting accesses by streams and events, without
// events that others imply. Throws ValueError if the stream map does not fit the plan.
Schedule schedule(const CompiledPlan& compiled, const StreamMap& at);

}  // namespace pycollect::cuda
