// One process, several devices: levels become launches on in-order streams, and waits that cross streams
// become events. What to issue is computed once per plan and placement, and is data.
#pragma once
#include <vector>

#include "../plan/program.h"

namespace pycollect::cuda {

// Which stream a task goes to. Streams 0..devices-1 are ours; every rank's caller has one of its own
// behind them, where entry and exit run; `share`: rank r's tasks run on the caller's streams themselves.
struct Placement {
  std::vector<int> device_of;  // [rank], as an index into the distinct devices of the call
  int devices;                 // distinct ones
  int lanes = 1;               // streams of ours per device: one per rank where a plan was named for
                               // virtual ranks, so that every wait is real
  std::vector<int> caller_of;  // [rank]: index among the distinct streams of callers
  int callers;
  int stream(const Task& task, Rank rank) const;
  int streams() const { return devices * lanes + callers; }
};

struct Issue {
  int stream;
  std::vector<Place> tasks;    // of one level
  std::vector<int> after = {};  // earlier issues on other streams
  bool recorded = false;        // somebody waits for this one
};
using Schedule = std::vector<Issue>;

// Only the events that nothing else implies, latest first.
Schedule schedule(const Program& program, const Levels& levels, const Placement& at);

}  // namespace pycollect::cuda
