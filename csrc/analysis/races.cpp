// Every rank has a vector clock: for each rank, the number of its tasks that are ordered before the
// next task. A task's clock is kept until all waits for the task are processed. Per chunk, the last
// write and the reads since are enough: an access ordered after them is also ordered after all
// earlier accesses.
#include "races.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "../plan/error.h"

namespace pycollect {
namespace {

using ReplayClock = std::vector<int>;  // [rank]

void join(ReplayClock& mine, const ReplayClock& seen) {
  for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = std::max(mine[i], seen[i]);
}

struct ReplayAccess {
  Rank rank = -1;  // no access yet
  int count = 0, step = kAllBuffers;
};
struct ReplayCell {
  ReplayAccess writer = {};
  std::vector<ReplayAccess> readers = {};  // since the writer
};

struct Done {       // state of one task
  int waiting = 0;  // number of waits for the task that have not been processed
  ReplayClock clock = {};
};

std::string words(const ReplayAccess& a) {
  return a.step < 0 ? text(a.count == 1 ? "the entry of rank " : "the exit of rank ", a.rank)
                    : text("step ", a.step, " by rank ", a.rank);
}

std::string place(const Plan& plan, int cell) {
  const int buffer = cell / plan.chunks;
  return text(kBufferNames[buffer % kBuffers], "[", cell % plan.chunks, "] of rank ",
              buffer / kBuffers);
}

class RaceReplay {
 public:
  RaceReplay(const Plan& plan, const Program& program, bool in_place)
      : plan_(plan),
        program_(program),
        in_place_(in_place),
        cells_(cells(plan)),
        done_(plan.world),
        next_(plan.world, 0),
        clocks_(plan.world, ReplayClock(plan.world)),
        waiters_(plan.world) {
    for (Rank r = 0; r < plan.world; ++r) done_[r].resize(program[r].size());
    for (const auto& tasks : program)
      for (const Task& task : tasks)
        for (Wait w : task.waits) ++done_[w.rank][w.count - 1].waiting, ++result_.waits;
  }

  RaceReport run() {
    std::vector<Rank> ready;
    for (Rank r = plan_.world; r-- > 0;) ready.push_back(r);
    while (!ready.empty()) {
      const Rank me = ready.back();
      ready.pop_back();
      while (advance(me)) {
        ready.insert(ready.end(), waiters_[me].begin(), waiters_[me].end());
        waiters_[me].clear();
      }
    }
    for (Rank r = 0; r < plan_.world; ++r)
      if (next_[r] < program_[r].size()) stuck(r);
    for (const ReplayClock& c : clocks_)
      result_.is_barrier &= *std::min_element(c.begin(), c.end()) > 0;
    return std::move(result_);
  }

 private:
  // Replays the next task of a rank, or adds the rank to the waiters of the rank for which it
  // waits. Returns whether a task was replayed.
  bool advance(Rank me) {
    if (next_[me] == program_[me].size()) return false;
    const Task& task = program_[me][next_[me]];
    for (Wait w : task.waits)
      if (next_[w.rank] < static_cast<std::size_t>(w.count)) {
        waiters_[w.rank].push_back(me);
        return false;
      }
    ReplayClock& clock = clocks_[me];
    for (Wait w : task.waits) {
      Done& done = done_[w.rank][w.count - 1];
      join(clock, done.clock);
      if (--done.waiting == 0) ReplayClock().swap(done.clock);
    }
    const ReplayAccess self{me, static_cast<int>(next_[me]) + 1, task.step};
    touch(task, self, clock);
    clock[me] = self.count;
    if (Done& done = done_[me][next_[me]]; done.waiting > 0) done.clock = clock;
    ++next_[me];
    return true;
  }

  void touch(const Task& task, const ReplayAccess& self, const ReplayClock& clock) {
    const Slices dsts = writes(plan_, task, self.rank);
    const Slices& srcs = reads(plan_, task);
    auto each = [&](const Slices& slices, auto&& f) {
      for (const Slice& s : slices) each_cell(plan_, in_place_, s, [&](int c) { f(cells_[c], c); });
    };
    auto ordered = [&](const ReplayAccess& a, int c) {
      if (a.rank < 0 || a.rank == self.rank || clock[a.rank] >= a.count) return;
      if (result_.races++ > 0) return;
      result_.defect = text(words(a), " and ", words(self), " both access ", place(plan_, c),
                            ", one of them writes, and nothing orders them");
    };
    each(srcs, [&](ReplayCell& cell, int c) { ordered(cell.writer, c); });
    each(dsts, [&](ReplayCell& cell, int c) {
      ordered(cell.writer, c);
      for (const ReplayAccess& a : cell.readers) ordered(a, c);
    });
    each(srcs, [&](ReplayCell& cell, int) { cell.readers.push_back(self); });
    each(dsts, [&](ReplayCell& cell, int) {
      cell.writer = self;
      cell.readers.clear();
    });
  }

  void stuck(Rank me) {
    if (std::exchange(result_.deadlock, true)) return;
    const Task& task = program_[me][next_[me]];
    for (Wait w : task.waits)
      if (next_[w.rank] < static_cast<std::size_t>(w.count))
        result_.defect =
            text("deadlock: ", words({me, static_cast<int>(next_[me]) + 1, task.step}),
                 " waits for task ", w.count, " of rank ", w.rank, ", which never ends");
  }

  const Plan& plan_;
  const Program& program_;
  bool in_place_;
  std::vector<ReplayCell> cells_;
  std::vector<std::vector<Done>> done_;     // [rank][task]
  std::vector<std::size_t> next_;           // [rank]: index of its next task
  std::vector<ReplayClock> clocks_;         // [rank]
  std::vector<std::vector<Rank>> waiters_;  // [rank]: ranks that wait for a task of it
  RaceReport result_;
};

void check(const Plan& plan, const Program& program) {
  require(static_cast<int>(program.size()) == plan.world, "a program of ", program.size(),
          " ranks does not belong to a plan of ", plan.world);
  for (const auto& tasks : program)
    for (const Task& task : tasks) {
      require(task.step >= kInOutBuffers && task.step < static_cast<int>(plan.steps.size()),
              "a task names step ", task.step, " of a plan with ", plan.steps.size());
      for (Wait w : task.waits)
        require(w.rank >= 0 && w.rank < plan.world && w.count >= 1 &&
                    w.count <= static_cast<int>(program[w.rank].size()),
                "a task waits for task ", w.count, " of rank ", w.rank, ", which does not exist");
    }
}

}  // namespace

RaceReport find_races(const Plan& plan, const Program& program, bool in_place) {
  check(plan, in_place);
  check(plan, program);
  return RaceReplay(plan, program, in_place).run();
}

}  // namespace pycollect
