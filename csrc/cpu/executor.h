// Runs a compiled plan in one process on host memory: level after level, each cut by elements over
// the threads that `parallel_for` gives. Knows nothing of torch: csrc/torch hands the threads in.
#pragma once
#include <cstdint>
#include <functional>

#include "../plan/call.h"

namespace pycollect::cpu {

// body(begin, end) for parts of [0, size), at least `grain` long, on any threads; returns when all
// ran.
using Body = std::function<void(int64_t, int64_t)>;
using ParallelFor = std::function<void(int64_t size, int64_t grain, const Body& body)>;

void run(const Call& call, const ParallelFor& parallel_for);

// The specification: step after step in the written order, on one thread.
void run_in_order(const Call& call);

}  // namespace pycollect::cpu
