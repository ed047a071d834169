// See executor.h. The smallest calls run in the written order on the calling thread; a level that
// moves enough bytes to pay for waking threads is cut over all of them, by bytes moved.
#include "executor.h"

#include <algorithm>

#include "step_runner.h"

namespace pycollect::cpu {
namespace {

// Below this many bytes read and written a level runs on the calling thread: one thread moves 1 MiB
// in 3 to 6 us, while handing a part to another costs 1 us if that spins and 35 us if it sleeps.
constexpr std::size_t kParallelBytes = 1 << 20;
// No thread gets less: about as long as it takes to hand it out.
constexpr std::size_t kGrainBytes = kParallelBytes / 4;
// From about here on no cache near the core keeps the result, and streamed stores are up to twice
// as fast. In place they lose up to threefold: see StepRunner.
constexpr std::size_t kStreamedBytes = 16 << 20;
// Cuts are a whole number of cache lines from a job's beginning, so that threads share none.
constexpr std::size_t kCacheLine = 64;

// One step on one binding's memory, and which of the bytes that its level moves are its own.
struct Job {
  const Binding* binding;
  int step;
  std::size_t elements;   // in all rows
  std::size_t moved_per;  // bytes read and written for each element
  std::size_t begin, end;
};

struct Level {
  std::vector<Job> jobs;
  std::size_t moved = 0, written = 0;
};

bool is_small(const Call& call) {
  std::size_t moved = 0;
  for (const Binding& binding : call.bindings)
    for (const Step& step : call.compiled.plan.steps) {
      moved += elements(binding, step) * item_bytes(call.dtype) * streams(step);
      if (moved >= kParallelBytes) return false;
    }
  return true;
}

void collect(const Call& call, const std::vector<Place>& places, Level& level) {
  level.jobs.clear();
  level.moved = level.written = 0;
  const std::size_t item = item_bytes(call.dtype);
  for (const Place& place : places) {
    const int at = call.compiled.program[place.rank][place.index].step;
    if (at == kBoundary) continue;
    const Step& step = call.compiled.plan.steps[at];
    for (const Binding& binding : call.bindings) {
      const std::size_t n = elements(binding, step);
      if (n == 0) continue;
      const std::size_t begin = level.moved;
      level.moved += n * item * streams(step);
      level.written += n * item * step.dsts.size();
      level.jobs.push_back({&binding, at, n, item * streams(step), begin, level.moved});
    }
  }
}

// The first element of the job that belongs to who begins at byte `at` of the level.
std::size_t cut(const Job& job, std::size_t at, std::size_t per_line) {
  if (at <= job.begin) return 0;
  const std::size_t element = (at - job.begin) / job.moved_per;
  return std::min(job.elements, (element + per_line - 1) / per_line * per_line);
}

void run_level(const StepRunner& runner, const Level& level, const ParallelFor& parallel_for,
               std::size_t per_line, bool streamed) {
  const auto part = [&](int64_t from, int64_t to) {
    const std::size_t begin = from, end = to;
    auto job = std::partition_point(level.jobs.begin(), level.jobs.end(),
                                    [&](const Job& j) { return j.end <= begin; });
    for (; job != level.jobs.end() && job->begin < end; ++job)
      runner.run(*job->binding, job->step, {cut(*job, begin, per_line), cut(*job, end, per_line)},
                 streamed);
  };
  if (level.moved < kParallelBytes)
    part(0, level.moved);
  else
    parallel_for(level.moved, kGrainBytes, part);
}

}  // namespace

void run_in_order(const Call& call) {
  const StepRunner runner(call);
  for (std::size_t step = 0; step < call.compiled.plan.steps.size(); ++step)
    for (const Binding& binding : call.bindings)
      runner.run(binding, step, {0, elements(binding, call.compiled.plan.steps[step])}, false);
}

void run(const Call& call, const ParallelFor& parallel_for) {
  if (is_small(call)) return run_in_order(call);
  const StepRunner runner(call);
  const std::size_t per_line = std::max<std::size_t>(1, kCacheLine / item_bytes(call.dtype));
  Level level;
  for (const std::vector<Place>& places : call.compiled.levels) {
    collect(call, places, level);
    if (level.jobs.empty()) continue;
    const bool streamed = call.options.non_temporal && level.written >= kStreamedBytes;
    run_level(runner, level, parallel_for, per_line, streamed);
  }
}

}  // namespace pycollect::cpu
