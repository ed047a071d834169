// Random plans from a seed. Any list of steps is a plan, so each must give the same result as one
// thread that runs the steps in the written order.
#pragma once
#include <algorithm>
#include <optional>
#include <random>
#include <vector>

#include "../../csrc/plan/passes.h"

namespace pycollect {

// All slices of a step are the same chunks of different ranks. Scratch is written before it is
// read, because staging buffers still hold data of earlier calls.
inline Plan random_plan(int world, uint64_t seed) {
  std::mt19937 random(static_cast<uint32_t>(seed));
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  Plan plan{world, 1 + below(4)};
  std::vector<bool> written(cells(plan));
  const auto side = [&](int first, int count, bool reads) {
    Slices slices;
    std::vector<Rank> ranks(world);
    for (Rank r = 0; r < world; ++r) ranks[r] = r;
    std::shuffle(ranks.begin(), ranks.end(), random);
    ranks.resize(1 + below(world));
    for (Rank r : ranks) {
      Slice s{r, static_cast<Buffer>(below(3)), first, count};
      bool ready = true;
      if (s.buffer == Buffer::scratch)
        each_cell(plan, false, s, [&](int c) { ready &= written[c]; });
      if (reads && !ready) s.buffer = Buffer::input;
      slices.push_back(s);
    }
    return slices;
  };
  for (int steps = 1 + below(20); steps > 0; --steps) {
    const int count = 1 + below(plan.chunks), first = below(plan.chunks - count + 1);
    Slices srcs = side(first, count, true), dsts = side(first, count, false);
    for (const Slice& d : dsts) each_cell(plan, false, d, [&](int c) { written[c] = true; });
    plan.fold(dsts, srcs, below(2) == 0 ? Step::kFirstDestination : below(world));
  }
  return plan;
}

// Returns nothing if the plan is invalid in place or needs more host memory than one rank has.
inline std::optional<Plan> plan_for_processes(const Plan& plan, bool in_place, bool open_input,
                                              bool open_output) {
  try {
    check(plan, in_place);
    return for_processes(plan, in_place, open_input, open_output);
  } catch (const std::invalid_argument&) {
    return {};
  }
}

}  // namespace pycollect
