// Turns a plan into one task list per rank, with the fewest waits that order every
// read-after-write, write-after-read and write-after-write between ranks. A wait is left out if
// other waits imply it. The tasks that a rank's earlier waits imply are searched on demand instead
// of stored with every task, so the time is linear in the numbers of slices and cells.
#include <algorithm>
#include <limits>
#include <queue>
#include <utility>

#include "program.h"

namespace pycollect {
namespace {

constexpr Rank kNone = -1;
struct LastAccess {
  Wait writer{kNone, 0};
  std::vector<Wait> readers = {};  // since the writer
};

struct TaskInfo {
  int written;  // position in the order of lowering; a task depends only on tasks before it
  int newest;   // largest Wait::count among the task's direct and indirect dependencies
};

// The tasks that one rank's waits imply: the first known[r] tasks of every rank r. The waits of
// these tasks are implied, too: those of the first searched[r] tasks are included, those of the
// tasks up to a wait in `pending` are not yet.
struct VectorClock {
  struct Pending {
    int newest;
    Wait wait;
    bool operator<(const Pending& o) const { return newest < o.newest; }
  };
  explicit VectorClock(int world) : known(world), searched(world) {}
  std::vector<int> known, searched;  // [rank]
  std::priority_queue<Pending> pending = {};
};

class Lowering {
 public:
  Lowering(const Plan& plan, bool in_place, LevelPolicy level_policy, int boundary)
      : plan_(plan),
        in_place_(in_place),
        level_policy_(level_policy),
        boundary_(boundary),
        cells_(cells(plan)),
        program_(plan.world),
        infos_(plan.world),
        wanted_(plan.world),
        clocks_(plan.world, VectorClock(plan.world)),
        boundary_cells_(plan.world) {
    std::vector<char> found(cells(plan));
    for (const Step& s : plan.steps)
      for (const Slices* side : {&s.dsts, &s.srcs})
        for (const Slice& slice : *side) find_boundary_cells(slice, found);
  }

  Program run() {
    for (Rank r = 0; r < plan_.world; ++r) add(r, boundary_);
    for (std::size_t i = 0; i < plan_.steps.size(); ++i)
      add(plan_.steps[i].owner(), static_cast<int>(i));
    for (Rank r = 0; r < plan_.world; ++r) add(r, boundary_);
    int last = 0;  // all ranks end in one level, so that callers' streams join once
    for (auto& tasks : program_) last = std::max(last, tasks.back().level);
    for (auto& tasks : program_) tasks.back().level = last;
    return std::move(program_);
  }

 private:
  // A boundary task writes all cells of its rank's buffers, but only those that steps use matter.
  void find_boundary_cells(const Slice& s, std::vector<char>& found) {
    if (boundary_ == kInOutBuffers && s.buffer != Buffer::input && s.buffer != Buffer::output)
      return;
    each_cell(plan_, in_place_, s, [&](int c) {
      if (!std::exchange(found[c], true)) boundary_cells_[s.rank].push_back(c);
    });
  }

  void add(Rank me, int step) {
    auto& tasks = program_[me];
    Task task{step,
              tasks.empty() ? 0 : tasks.back().level + (level_policy_ == LevelPolicy::one_task)};
    const auto each = [&](const Slices& slices, auto&& f) {
      for (const Slice& s : slices) each_cell(plan_, in_place_, s, [&](int c) { f(cells_[c]); });
    };
    const auto each_written = [&](auto&& f) {
      if (step >= 0) return each(plan_.steps[step].dsts, f);
      for (const int c : boundary_cells_[me]) f(cells_[c]);
    };
    if (step < 0 && !tasks.empty()) after(me, task, {me, 1});  // both write cells without steps
    const Slices& srcs = reads(plan_, task);
    each(srcs, [&](LastAccess& c) { after(me, task, c.writer); });
    each_written([&](LastAccess& c) {
      after(me, task, c.writer);
      for (Wait r : c.readers) after(me, task, r);
    });
    const Wait self{me, static_cast<int>(tasks.size()) + 1};
    each(srcs, [&](LastAccess& c) { c.readers.push_back(self); });
    each_written([&](LastAccess& c) {
      c.writer = self;
      c.readers.clear();
    });
    choose(me, task);
    int newest = infos_[me].empty() ? 0 : infos_[me].back().newest;
    for (Wait w : task.waits) newest = std::max({newest, w.count, info(w).newest});
    infos_[me].push_back({written_++, newest});
    tasks.push_back(std::move(task));
  }

  // Orders the task after `w`, with which it conflicts: on a higher level, and with a wait unless
  // both are tasks of the same rank.
  void after(Rank me, Task& task, Wait w) {
    if (w.rank == kNone) return;
    task.level = std::max(task.level, program_[w.rank][w.count - 1].level + 1);
    if (w.rank == me) return;
    if (wanted_[w.rank] == 0) touched_.push_back(w.rank);
    wanted_[w.rank] = std::max(wanted_[w.rank], w.count);
  }

  // Adds the wanted waits that no other wait implies. Begins with the latest task, because a task
  // can imply only waits for tasks written before it.
  void choose(Rank me, Task& task) {
    auto written = [&](Rank r) { return info({r, wanted_[r]}).written; };
    std::sort(touched_.begin(), touched_.end(),
              [&](Rank a, Rank b) { return written(a) > written(b); });
    for (Rank r : touched_) {
      const Wait w{r, std::exchange(wanted_[r], 0)};
      if (implies(clocks_[me], w)) continue;
      task.waits.push_back(w);
      add_wait(clocks_[me], w);
    }
    touched_.clear();
  }

  // Returns whether earlier waits imply `w`. With a ring of more than 64 ranks every rank would
  // search all tasks, so there the search stops early: a redundant wait costs one load and is
  // correct.
  bool implies(VectorClock& clock, Wait w) {
    int budget = plan_.world <= 64 ? std::numeric_limits<int>::max() : 16;
    while (budget-- > 0 && clock.known[w.rank] < w.count && !clock.pending.empty() &&
           clock.pending.top().newest >= w.count) {
      const Wait p = clock.pending.top().wait;
      clock.pending.pop();
      for (int i = clock.searched[p.rank]; i < p.count; ++i)
        for (Wait v : program_[p.rank][i].waits) add_wait(clock, v);
      clock.searched[p.rank] = std::max(clock.searched[p.rank], p.count);
    }
    return clock.known[w.rank] >= w.count;
  }

  void add_wait(VectorClock& clock, Wait w) {
    if (clock.known[w.rank] >= w.count) return;
    clock.known[w.rank] = w.count;
    if (info(w).newest > 0) clock.pending.push({info(w).newest, w});
  }

  const TaskInfo& info(Wait w) const { return infos_[w.rank][w.count - 1]; }

  const Plan& plan_;
  bool in_place_;
  LevelPolicy level_policy_;
  int boundary_;
  std::vector<LastAccess> cells_;
  Program program_;
  std::vector<std::vector<TaskInfo>> infos_;
  std::vector<int> wanted_;    // [rank]: the count for which the current task must wait; 0: none
  std::vector<Rank> touched_;  // ranks with a wanted count
  std::vector<VectorClock> clocks_;
  std::vector<std::vector<int>> boundary_cells_;  // [rank]
  int written_ = 0;
};

}  // namespace

Program lower(const Plan& plan, bool in_place, LevelPolicy level_policy, int boundary) {
  return Lowering(plan, in_place, level_policy, boundary).run();
}

// The waits do not determine the levels, as there are none between tasks of one rank.
Levels levels(const Program& program) {
  Levels result(program.empty() ? 0 : program[0].back().level + 1);
  for (Rank r = 0; r < static_cast<Rank>(program.size()); ++r)
    for (int i = 0; i < static_cast<int>(program[r].size()); ++i)
      result[program[r][i].level].push_back({r, i});
  return result;
}

}  // namespace pycollect
