// See passes.h. Each pass visits the steps once, and records for each cell (one chunk of one buffer
// of one rank) how the steps that it has placed so far access it.
#include "passes.h"

#include <algorithm>
#include <utility>

#include "stage.h"

namespace pycollect {
namespace {

constexpr int kNone = -1;

class Merging {
 public:
  Merging(const Plan& plan, bool in_place)
      : plan_(plan),
        in_place_(in_place),
        result_{plan.world, plan.chunks},
        writer_(cells(plan), kNone),
        touched_(cells(plan), kNone) {}

  Plan run() {
    for (const Step& step : plan_.steps) {
      Step left = step;
      left.by = step.owner();
      if (step.srcs.size() == 1)
        std::erase_if(left.dsts, [&](const Slice& d) {
          return same(d, step.srcs[0]) || joins_fold(left.by, d, step.srcs[0]);
        });
      if (!left.dsts.empty()) keep(std::move(left));
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

  const Plan& plan_;
  bool in_place_;
  Plan result_;
  std::vector<int> writer_, touched_;  // [cell]: the last step of the result
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

Plan forward_copies(const Plan& plan, bool in_place) { return Merging(plan, in_place).run(); }

Plan hoist_local_copies(const Plan& plan, bool in_place) {
  std::vector<bool> written(cells(plan)), touched(cells(plan));  // by steps that are not moved
  Plan result{plan.world, plan.chunks};
  std::vector<Step> behind;
  for (const Step& step : plan.steps) {
    bool first = fills_own(step);
    auto each = [&](const Slices& slices, auto&& f) {
      for (const Slice& s : slices) each_cell(plan, in_place, s, f);
    };
    each(step.srcs, [&](int c) { first &= !written[c]; });
    each(step.dsts, [&](int c) { first &= !touched[c]; });
    (first ? result.steps : behind).push_back(step);
    if (first) continue;
    each(step.srcs, [&](int c) { touched[c] = true; });
    each(step.dsts, [&](int c) { written[c] = touched[c] = true; });
  }
  result.steps.insert(result.steps.end(), behind.begin(), behind.end());
  return result;
}

Plan for_processes(const Plan& plan, bool in_place, bool input, bool output, bool push_to_all) {
  const Plan staged =
      stage(plan, in_place, MemoryReach::processes(plan.world, input, output, push_to_all));
  return hoist_local_copies(forward_copies(staged, in_place), in_place);
}

}  // namespace pycollect
