// See executor.h. Small calls run step by step on the calling thread. A level that moves enough
// bytes to pay for waking threads is split among all threads, by bytes moved.
#include "executor.h"

#include <algorithm>

#include "step_runner.h"

namespace pycollect::cpu {
namespace {

// A level that reads and writes fewer bytes runs on the calling thread: one thread moves 1 MiB in 3
// to 6 us, while passing a part to another thread costs 1 us if that spins and 35 us if it sleeps.
constexpr std::size_t kParallelBytes = 1 << 20;
// Fewest bytes for one thread: moving them takes about as long as passing them to the thread.
constexpr std::size_t kGrainBytes = kParallelBytes / 4;
// From about this size on no cache near the core keeps the result, and streamed stores are up to
// twice as fast. In place they are up to three times as slow: see RowRunner.
constexpr std::size_t kStreamedBytes = 16 << 20;
// Threads' parts begin at a multiple of this from a job's beginning, so that they share no line.
constexpr std::size_t kCacheLine = 64;

// One step on one binding's memory, with its range [begin, end) of the bytes that its level moves.
struct LevelJob {
  const Binding* binding;
  int step;
  std::size_t elements;   // in all rows
  std::size_t moved_per;  // bytes read and written for each element
  std::size_t begin, end;
};

struct Level {
  std::vector<LevelJob> jobs;
  std::size_t moved = 0, written = 0;
};

bool is_small(const BoundPlan& call) {
  std::size_t moved = 0;
  for (const Binding& binding : call.bindings)
    for (const Step& step : call.compiled.plan.steps) {
      moved += elements(binding, step) * item_bytes(call.dtype) * operands(step);
      if (moved >= kParallelBytes) return false;
    }
  return true;
}

void collect(const BoundPlan& call, const std::vector<TaskId>& places, Level& level) {
  level.jobs.clear();
  level.moved = level.written = 0;
  const std::size_t item = item_bytes(call.dtype);
  for (const TaskId& place : places) {
    const int at = call.compiled.program[place.rank][place.index].step;
    if (at == kAllBuffers) continue;
    const Step& step = call.compiled.plan.steps[at];
    for (const Binding& binding : call.bindings) {
      const std::size_t n = elements(binding, step);
      if (n == 0) continue;
      const std::size_t begin = level.moved;
      level.moved += n * item * operands(step);
      level.written += n * item * step.dsts.size();
      level.jobs.push_back({&binding, at, n, item * operands(step), begin, level.moved});
    }
  }
}

// The first element of the job in a part that begins at byte `at` of the level.
std::size_t cut(const LevelJob& job, std::size_t at, std::size_t per_line) {
  if (at <= job.begin) return 0;
  const std::size_t element = (at - job.begin) / job.moved_per;
  return std::min(job.elements, (element + per_line - 1) / per_line * per_line);
}

void run_level(const RowRunner& row, const BoundPlan& call, const Level& level,
               const ParallelFor& parallel_for, std::size_t per_line, bool non_temporal) {
  const auto part = [&](int64_t from, int64_t to) {
    const std::size_t begin = from, end = to;
    auto job = std::partition_point(level.jobs.begin(), level.jobs.end(),
                                    [&](const LevelJob& j) { return j.end <= begin; });
    for (; job != level.jobs.end() && job->begin < end; ++job)
      run_step(row, call.compiled, *job->binding, job->step,
               {cut(*job, begin, per_line), cut(*job, end, per_line)}, non_temporal);
  };
  if (level.moved < kParallelBytes)
    part(0, level.moved);
  else
    parallel_for(level.moved, kGrainBytes, part);
}

}  // namespace

void run_in_order(const BoundPlan& call) {
  const RowRunner row(call.dtype, call.op, call.options);
  for (std::size_t step = 0; step < call.compiled.plan.steps.size(); ++step)
    for (const Binding& binding : call.bindings)
      run_step(row, call.compiled, binding, step,
               {0, elements(binding, call.compiled.plan.steps[step])}, false);
}

void run(const BoundPlan& call, const ParallelFor& parallel_for) {
  if (is_small(call)) return run_in_order(call);
  const RowRunner row(call.dtype, call.op, call.options);
  const std::size_t per_line = std::max<std::size_t>(1, kCacheLine / item_bytes(call.dtype));
  Level level;
  for (const std::vector<TaskId>& places : call.compiled.levels) {
    collect(call, places, level);
    if (level.jobs.empty()) continue;
    const bool non_temporal = call.options.non_temporal && level.written >= kStreamedBytes;
    run_level(row, call, level, parallel_for, per_line, non_temporal);
  }
}

}  // namespace pycollect::cpu
