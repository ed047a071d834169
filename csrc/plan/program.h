// A program, the result of `lower`: a task list per rank, with waits and levels.
#pragma once
#include <vector>

#include "plan.h"

namespace pycollect {

struct Wait {
  Rank rank;
  int count;
};  // waits until `rank` has finished its first `count` tasks
struct TaskId {
  Rank rank;
  int index;
};  // the task program[rank][index]

inline constexpr int kAllBuffers = -1;
inline constexpr int kInOutBuffers = -2;
struct Task {
  // A step of the plan. kAllBuffers: a task that moves nothing and owns all of its rank's buffers.
  // kInOutBuffers: the same, but it owns only input and output, because the next run of the plan
  // uses other scratch and host memory.
  int step;
  int level;  // above every task it conflicts with, never below its rank's previous task
  std::vector<Wait> waits = {};
};

// The tasks of each rank, in order. The first one means that the rank's buffers are ready, and the
// last one that they belong to the caller again.
using Program = std::vector<std::vector<Task>>;
using Levels = std::vector<std::vector<TaskId>>;

// The number of tasks of a rank that a level may hold. `any` gives the fewest levels (two_shot: 2);
// `one_task` keeps the pieces of a pipeline in separate levels, which `any` would merge into one.
enum class LevelPolicy { any, one_task };

// `boundary` is the `step` of the first and the last task of every rank: kAllBuffers or
// kInOutBuffers.
Program lower(const Plan& plan, bool in_place, LevelPolicy level_policy = LevelPolicy::any,
              int boundary = kAllBuffers);
Levels levels(const Program& program);

// The slices that a task reads and writes, boundaries included.
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
