// What `lower` makes of a plan: a task list per rank, with waits and levels.
#pragma once
#include <vector>

#include "plan.h"

namespace pycollect {

struct Wait {
  Rank rank;
  int count;
};  // until `rank` has finished its first `count` tasks
struct Place {
  Rank rank;
  int index;
};  // program[rank][index]

inline constexpr int kBoundary = -1;
inline constexpr int kSides = -2;
struct Task {
  // Of the plan; or kBoundary: moves nothing, owns all of a rank's buffers; or kSides: owns its
  // input and output only, because scratch and host memory are others when the plan runs next.
  int step;
  int level;  // above every task it conflicts with, never below its rank's last task
  std::vector<Wait> waits = {};
};

// What each rank runs, in order. The first task is "my buffers are ready" and the last is "my
// buffers are mine again".
using Program = std::vector<std::vector<Task>>;
using Levels = std::vector<std::vector<Place>>;

// How many tasks of a rank a level may hold. `any` gives the fewest levels (two_shot: 2);
// `one_task` keeps the pieces of a pipeline one behind the other, which `any` would merge into one.
enum class Pace { any, one_task };

// `boundary` says what the first and the last task of every rank are: kBoundary or kSides.
Program lower(const Plan& plan, bool in_place, Pace pace = Pace::any, int boundary = kBoundary);
Levels levels(const Program& program);

// The slices that a task reads and writes, boundaries included.
inline const Slices& reads(const Plan& p, const Task& t) {
  static const Slices none;
  return t.step < 0 ? none : p.steps[t.step].srcs;
}
inline Slices writes(const Plan& p, const Task& t, Rank r) {
  if (t.step >= 0) return p.steps[t.step].dsts;
  Slices all{in(r, 0, p.chunks), out(r, 0, p.chunks)};
  if (t.step == kBoundary) all.insert(all.end(), {tmp(r, 0, p.chunks), host(r, 0, p.chunks)});
  return all;
}

}  // namespace pycollect
