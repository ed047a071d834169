// Each stream has a vector clock: for every stream, the number of its launches that are done before
// the next launch on this one. Conflicts are found from the accesses of the plan's steps. The waits
// of the program do not suffice: they order tasks of different ranks only, and the tasks of one
// rank may be on several streams here.
#include "schedule.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "../plan/error.h"

namespace pycollect::cuda {
namespace {

using StreamClock = std::vector<int>;  // [stream]: number of launches

void join(StreamClock& mine, const StreamClock& seen) {
  for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = std::max(mine[i], seen[i]);
}

constexpr int kNone = -1;
struct LastStreamAccess {
  int writer = kNone;             // index of a launch
  std::vector<int> readers = {};  // since the writer
};

void check(const Plan& plan, const StreamMap& at) {
  require(static_cast<int>(at.stream_ids.size()) == plan.world, "a stream map of ",
          at.stream_ids.size(), " ranks does not fit a plan of ", plan.world);
  auto inside = [&](int stream) { return stream >= 0 && stream < at.streams; };
  for (Rank r = 0; r < plan.world; ++r) {
    const RankStreamIds& me = at.stream_ids[r];
    for (int stream : {me.caller, me.d2h, me.h2d})
      require(inside(stream), "rank ", r, " uses stream ", stream, "; streams are numbered 0 to ",
              at.streams - 1);
  }
}

class Scheduling {
 public:
  Scheduling(const CompiledPlan& compiled, const StreamMap& at)
      : plan_(compiled.plan),
        compiled_(compiled),
        at_(at),
        cells_(cells(plan_)),
        clocks_(at.streams, StreamClock(at.streams)) {}

  Schedule run() {
    for (const std::vector<TaskId>& level : compiled_.levels) {
      std::vector<ScheduledLaunch> launches = grouped(level);
      for (ScheduledLaunch& launch : launches)
        launch.after = not_implied(conflicting(launch), clocks_[launch.stream]);
      for (ScheduledLaunch& launch : launches) commit(std::move(launch));
    }
    return std::move(result_);
  }

 private:
  const Task& task(TaskId p) const { return compiled_.program[p.rank][p.index]; }

  int stream(TaskId p) const {
    const RankStreamIds& me = at_.stream_ids[p.rank];
    const int step = task(p).step;
    if (step == kAllBuffers) return me.caller;
    const auto& [dsts, srcs, by] = plan_.steps[step];
    if (srcs.size() > 1 || dsts.size() > 1) return me.caller;
    if (dsts[0].buffer == Buffer::host) return me.d2h;
    return srcs[0].buffer == Buffer::host ? me.h2d : me.caller;
  }

  // The slices that a task writes, without those that a copy would write onto themselves in place.
  Slices written(TaskId p) const {
    Slices dsts = writes(plan_, task(p), p.rank);
    const Slices& srcs = reads(plan_, task(p));
    if (srcs.size() == 1)
      std::erase_if(dsts, [&](const Slice& d) { return first_cell(d) == first_cell(srcs[0]); });
    return dsts;
  }
  int first_cell(Slice s) const {
    s.count = 1;
    int at = 0;
    each_cell(plan_, compiled_.in_place, s, [&](int c) { at = c; });
    return at;
  }

  // One launch for each stream that has tasks in the level, in the order of the streams.
  std::vector<ScheduledLaunch> grouped(const std::vector<TaskId>& level) const {
    std::vector<ScheduledLaunch> launches;
    for (int s = 0; s < at_.streams; ++s) launches.push_back({s, {}});
    for (TaskId p : level)
      if (!written(p).empty()) launches[stream(p)].tasks.push_back(p);
    std::erase_if(launches, [](const ScheduledLaunch& launch) { return launch.tasks.empty(); });
    return launches;
  }

  template <class F>
  void each(const Slices& slices, F&& f) {
    for (const Slice& s : slices)
      each_cell(plan_, compiled_.in_place, s, [&](int c) { f(cells_[c]); });
  }

  // Returns the launches of lower levels with a conflicting access. Tasks of one level have none.
  std::vector<int> conflicting(const ScheduledLaunch& launch) {
    std::vector<int> found;
    for (TaskId p : launch.tasks) {
      each(reads(plan_, task(p)), [&](LastStreamAccess& c) { found.push_back(c.writer); });
      each(written(p), [&](LastStreamAccess& c) {
        found.push_back(c.writer);
        found.insert(found.end(), c.readers.begin(), c.readers.end());
      });
    }
    return found;
  }

  // Returns the launches that are implied neither by `clock` nor by another of the launches. Begins
  // with the latest, because a launch can imply only earlier ones.
  std::vector<int> not_implied(std::vector<int> earlier, StreamClock clock) const {
    std::sort(earlier.begin(), earlier.end(), std::greater<>());
    std::vector<int> kept;
    for (int w : earlier) {
      if (w == kNone) break;
      const int other = result_[w].stream;
      if (clock[other] >= clocks_after_[w][other]) continue;
      kept.push_back(w);
      join(clock, clocks_after_[w]);
    }
    return kept;
  }

  void commit(ScheduledLaunch launch) {
    const int self = static_cast<int>(result_.size());
    StreamClock& clock = clocks_[launch.stream];
    for (int w : launch.after) {
      join(clock, clocks_after_[w]);
      result_[w].recorded = true;
    }
    ++clock[launch.stream];
    clocks_after_.push_back(clock);
    for (TaskId p : launch.tasks)
      each(reads(plan_, task(p)), [&](LastStreamAccess& c) {
        if (c.readers.empty() || c.readers.back() != self) c.readers.push_back(self);
      });
    for (TaskId p : launch.tasks) each(written(p), [&](LastStreamAccess& c) { c = {self, {}}; });
    result_.push_back(std::move(launch));
  }

  const Plan& plan_;
  const CompiledPlan& compiled_;
  const StreamMap& at_;
  std::vector<LastStreamAccess> cells_;
  std::vector<StreamClock> clocks_;        // [stream]: its clock
  std::vector<StreamClock> clocks_after_;  // [launch]: its stream's clock after it
  Schedule result_;
};

}  // namespace

Schedule schedule(const CompiledPlan& compiled, const StreamMap& at) {
  check(compiled.plan, at);
  return Scheduling(compiled, at).run();
}

}  // namespace pycollect::cuda
