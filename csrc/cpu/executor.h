// Runs a compiled plan in one process on host memory: level after level, each split by elements
// among the threads of `parallel_for`. Does not depend on torch: csrc/torch passes the threads in.
#pragma once
#include <cstdint>
#include <functional>

#include "../plan/compiled_plan.h"

namespace pycollect::cpu {

// Calls body(begin, end) for parts of [0, size), at least `grain` long, on any threads; returns
// when all calls have returned.
using Body = std::function<void(int64_t, int64_t)>;
using ParallelFor = std::function<void(int64_t size, int64_t grain, const Body& body)>;

void run(const BoundPlan& call, const ParallelFor& parallel_for);

// Reference execution, the specification: step after step in written order, on one thread.
void run_in_order(const BoundPlan& call);

}  // namespace pycollect::cpu
