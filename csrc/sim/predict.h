// Seconds, with alpha-beta per link: a wait costs alpha, and bytes queue at every port, bridge and
// memory they pass. Either a process per rank with a device each, or one process that issues to the
// streams of any number of devices. Good for "which algorithm, which size", not for the last 20 %;
// knows nothing of what a fold costs to compute, nor of how fast host memory is.
#pragma once
#include <vector>

#include "../cuda/streams.h"
#include "../plan/program.h"

namespace pycollect {

struct Model {
  double alpha;   // seconds for one rank or stream to see that another is done
  double port;    // bytes per second into a device, and as many out of it
  double memory;  // bytes per second of a device's memory, reads and writes together
  double bridge;  // bytes per second between the two halves of the world, each way; 0: no bridge
  double host = 2.5e-6;  // seconds to issue a launch, a copy or an event, in one process only
};

// Round numbers of the kind of machine, not measurements of one.
struct NamedModel {
  const char* name;
  Model model;
};
const std::vector<NamedModel>& models();

struct Span {  // one task, as it would run
  Rank rank;
  int step;  // of the plan, or kBoundary
  double start, end;
};
struct Prediction {
  double seconds = 0;
  std::vector<Span> spans = {};  // entries, then the steps as written, then exits
};

// `bytes`: of a rank's largest buffer, cut evenly into the plan's chunks. Throws ValueError for a
// model or bytes that make no sense, and for a program in which a wait points forward.
Prediction predict(const Plan& plan, const Program& program, double bytes, const Model& model);

// One process: streams, launches and events, and a host that issues them one by one. `devices`:
// [rank], as small numbers; negative in host memory. Seconds until the last stream is done.
double predict(const Compiled& compiled, const cuda::Placement& at, const std::vector<int>& devices,
               double bytes, const Model& model);

}  // namespace pycollect
