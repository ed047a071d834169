// A program, the result of `lower`: a task list per rank, with waits and levels.
#pragma once
#include <vector>

#include "plan.h"

namespace pycollect {

// A task with this wait starts only when `rank` has finished its first `count` tasks.
struct Wait {
  Rank rank;
  int count;
};
// Identifies the task program[rank][index].
struct TaskId {
  Rank rank;
  int index;
};

// The `step` of a boundary task, the first and the last task of every rank. It moves no data, and
// counts as a write of the rank's buffers: all accesses to them are ordered after the first and
// before the last task. kAllBuffers: all buffers. kInOutBuffers: only input and output, for an
// executor whose next run uses other scratch and host memory (two staging buffers, alternately).
inline constexpr int kAllBuffers = -1;
inline constexpr int kInOutBuffers = -2;
struct Task {
  int step;   // index of a step of the plan, or kAllBuffers or kInOutBuffers
  int level;  // above earlier tasks with conflicting accesses, not below the rank's previous task
  std::vector<Wait> waits = {};
};

// [rank][index]: the tasks of each rank, in order. The plan may access a rank's buffers after the
// rank's first task, and the caller may access them again after its last task.
using Program = std::vector<std::vector<Task>>;
using Levels = std::vector<std::vector<TaskId>>;  // [level]: the tasks that may run together

// The number of tasks of a rank that a level may hold. `any` gives the fewest levels (2 for the
// steps of two_shot). `one_task` keeps the pieces of a pipeline in separate levels, so that they
// overlap; `any` would merge them into one level.
enum class LevelPolicy { any, one_task };

// `boundary`: the `step` of every rank's first and last task, kAllBuffers or kInOutBuffers.
Program lower(const Plan& plan, bool in_place, LevelPolicy level_policy = LevelPolicy::any,
              int boundary = kAllBuffers);
// Sorts the tasks by level. Two tasks with conflicting accesses never have the same level, and a
// task waits only for tasks of lower levels, so running one level after the other satisfies all
// waits.
Levels levels(const Program& program);

// The slices that a task reads and writes; a boundary task writes buffers of its rank `r`.
inline const Slices& reads(const Plan& p, const Task& t) {
  static const Slices none;
  return t.step < 0 ? none : p.steps[t.step].srcs;
}
inline Slices writes(const Plan& p, const Task& t, Rank r) {
  if (t.step >= 0) return p.steps[t.step].dsts;
  Slices all{in(r, 0, p.chunks), out(r, 0, p.chunks)};
  if (t.step == kAllBuffers) all.insert(all.end(), {tmp(r, 0, p.chunks), host(r, 0, p.chunks)});
  return all;
}

}  // namespace pycollect
