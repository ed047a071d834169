// See passes.h. Each pass visits the steps once, and records for each cell (one chunk of one buffer
// of one rank) how the steps that it has placed so far access it.
#include "passes.h"

#include <algorithm>
#include <utility>

#include "cell_map.h"
#include "stage.h"

namespace pycollect {
namespace {

constexpr int kNone = -1;

class Merging {
 public:
  Merging(Plan plan, bool in_place)
      : plan_(std::move(plan)),
        in_place_(in_place),
        result_{plan_.world, plan_.chunks},
        writer_(plan_, kNone),
        touched_(plan_, kNone) {
    result_.steps.reserve(plan_.steps.size());
  }

  Plan run() {
    for (Step& step : plan_.steps) {
      step.by = step.owner();
      if (step.srcs.size() == 1)
        std::erase_if(step.dsts, [&](const Slice& d) {
          return same(d, step.srcs[0]) || joins_fold(step.by, d, step.srcs[0]);
        });
      if (!step.dsts.empty()) keep(std::move(step));
    }
    return std::move(result_);
  }

 private:
  template <class F>
  void each(const Slice& s, F&& f) const {
    each_cell(plan_, in_place_, s, std::forward<F>(f));
  }
  int first_cell(const Slice& s) const {
    int at = 0;
    each({s.rank, s.buffer, s.first}, [&](int c) { at = c; });
    return at;
  }
  bool same(const Slice& a, const Slice& b) const {
    return a.count == b.count && first_cell(a) == first_cell(b);
  }
  bool is_among(const Slices& slices, const Slice& s) const {
    return std::any_of(slices.begin(), slices.end(), [&](const Slice& o) { return same(o, s); });
  }

  // If `src` is the result of a fold by the same rank, and no step touched `d` since, adds `d` to
  // the fold's destinations and returns true.
  bool joins_fold(Rank by, const Slice& d, const Slice& src) {
    const int at = writer_[first_cell(src)];
    if (at == kNone) return false;
    Step& fold = result_.steps[at];
    if (fold.srcs.size() == 1 || fold.owner() != by || !is_among(fold.dsts, src)) return false;
    bool whole = true, free = true;
    each(src, [&](int c) { whole &= writer_[c] == at; });
    each(d, [&](int c) { free &= touched_[c] < at; });
    if (!whole || !free) return false;
    fold.dsts.push_back(d);
    each(d, [&](int c) { writer_[c] = touched_[c] = at; });
    return true;
  }

  void keep(Step step) {
    const int self = static_cast<int>(result_.steps.size());
    for (const Slice& s : step.srcs) each(s, [&](int c) { touched_[c] = self; });
    for (const Slice& d : step.dsts) each(d, [&](int c) { writer_[c] = touched_[c] = self; });
    result_.steps.push_back(std::move(step));
  }

  Plan plan_;
  bool in_place_;
  Plan result_;
  CellMap<int> writer_, touched_;  // the last step of the result
};

bool fills_own(const Step& step) {
  const Rank me = step.owner();
  auto own = [&](const Slice& s) { return s.rank == me; };
  auto kept = [&](const Slice& s) {
    return s.rank == me && (s.buffer == Buffer::scratch || s.buffer == Buffer::host);
  };
  return std::all_of(step.srcs.begin(), step.srcs.end(), own) &&
         std::all_of(step.dsts.begin(), step.dsts.end(), kept);
}

}  // namespace

Plan forward_copies(Plan plan, bool in_place) { return Merging(std::move(plan), in_place).run(); }

Plan hoist_local_copies(Plan plan, bool in_place) {
  CellMap<char> written(plan, false), touched(plan, false);  // by steps that are not moved
  std::vector<bool> moves;                                   // [step]
  for (const Step& step : plan.steps) {
    bool first = fills_own(step);
    auto each = [&](const Slices& slices, auto&& f) {
      for (const Slice& s : slices) each_cell(plan, in_place, s, f);
    };
    each(step.srcs, [&](int c) { first &= !written[c]; });
    each(step.dsts, [&](int c) { first &= !touched[c]; });
    moves.push_back(first);
    if (first) continue;
    each(step.srcs, [&](int c) { touched[c] = true; });
    each(step.dsts, [&](int c) { written[c] = touched[c] = true; });
  }
  Plan result{plan.world, plan.chunks};
  result.steps.reserve(plan.steps.size());
  for (const bool first : {true, false})
    for (std::size_t i = 0; i < plan.steps.size(); ++i)
      if (moves[i] == first) result.steps.push_back(std::move(plan.steps[i]));
  return result;
}

Plan for_processes(const Plan& plan, bool in_place, bool input, bool output) {
  Plan staged = stage(plan, in_place, MemoryReach::processes(plan.world, input, output));
  return hoist_local_copies(forward_copies(std::move(staged), in_place), in_place);
}

}  // namespace pycollect
