// Predicts the seconds that a plan takes, with an alpha-beta model per link: a wait costs alpha,
// and bytes queue at every port, bridge and memory that they pass. Models one process and device
// per rank, or one process that issues to streams of any number of devices. Good enough to choose
// an algorithm for a size, not for the last 20 %: the compute time of a fold and the speed of host
// memory are not modelled.
#pragma once
#include <vector>

#include "../cuda/schedule.h"
#include "../plan/program.h"

namespace pycollect {

struct CostModel {
  double alpha;   // seconds until one rank or stream sees that another is done
  double port;    // bytes per second into a device, and as many out of it
  double memory;  // bytes per second of a device's memory, reads and writes together
  double bridge;  // bytes per second between the two halves of the world, each way; 0: no bridge
  double host = 2.5e-6;  // seconds to issue a launch, a copy or an event; used for one process only
};

// Throws ValueError for an invalid model or number of bytes.
void check_model(double bytes, const CostModel& model);

// Models with round numbers for a kind of machine, not measured on one.
struct NamedCostModel {
  const char* name;
  CostModel model;
};
const std::vector<NamedCostModel>& models();

struct TimeSpan {  // predicted time of one task
  Rank rank;
  int step;  // of the plan, or kAllBuffers
  double start, end;
};
struct Prediction {
  double seconds = 0;
  std::vector<TimeSpan> spans = {};  // all ranks' entries, the steps as written, all ranks' exits
};

// Predicts for one process per rank. `bytes`: of a rank's largest buffer, cut evenly into the
// plan's chunks. Throws ValueError for an invalid model or number of bytes, and for a program in
// which a wait points forward.
Prediction predict(const Plan& plan, const Program& program, double bytes, const CostModel& model);

// Predicts for one process, whose host issues launches and events to streams one by one. `devices`:
// [rank], small numbers; negative for host memory. Returns the seconds to the last stream's end.
double predict(const CompiledPlan& compiled, const cuda::StreamMap& at,
               const std::vector<int>& devices, double bytes, const CostModel& model);

}  // namespace pycollect
