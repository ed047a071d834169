// Every stream is an actor with a clock, as ranks are in sim/races.h: how much of every stream is
// known to be done. Conflicts are looked up in the plan again: the waits of a program are the
// fewest between ranks, and a rank's tasks need not be on one stream here.
#include "streams.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "../plan/error.h"

namespace pycollect::cuda {
namespace {

using StreamClock = std::vector<int>;  // [stream]: how many issues

void join(StreamClock& mine, const StreamClock& seen) {
  for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = std::max(mine[i], seen[i]);
}

constexpr int kNobody = -1;
struct LastStreamAccess {
  int writer = kNobody;           // an issue
  std::vector<int> readers = {};  // since the writer
};

void check(const Plan& plan, const StreamMap& at) {
  require(static_cast<int>(at.stream_ids.size()) == plan.world, "a placement of ",
          at.stream_ids.size(), " ranks is not one of a plan of ", plan.world);
  auto inside = [&](int stream) { return stream >= 0 && stream < at.streams; };
  for (Rank r = 0; r < plan.world; ++r) {
    const StreamIds& me = at.stream_ids[r];
    for (int stream : {me.caller, me.worker, me.sender, me.receiver}) {
      require(inside(stream), "rank ", r, " is on stream ", stream, " of ", at.streams);
      require(stream != at.hub, "rank ", r, " is on stream ", stream, ", which is the hub");
    }
  }
  require(at.hub == kNoHub || inside(at.hub), "the hub is stream ", at.hub, " of ", at.streams);
}

class Scheduling {
 public:
  Scheduling(const Compiled& compiled, const StreamMap& at)
      : plan_(compiled.plan),
        compiled_(compiled),
        at_(at),
        cells_(cells(plan_)),
        now_(at.streams, StreamClock(at.streams)) {}

  Schedule run() {
    for (const std::vector<TaskId>& level : compiled_.levels) {
      std::vector<ScheduledLaunch> issues = grouped(level);
      for (ScheduledLaunch& issue : issues) issue.after = needed(wanted(issue), now_[issue.stream]);
      join_through_hub(issues);
      for (ScheduledLaunch& issue : issues) commit(std::move(issue));
    }
    return std::move(result_);
  }

 private:
  const Task& task(TaskId p) const { return compiled_.program[p.rank][p.index]; }

  int stream(TaskId p) const {
    const StreamIds& me = at_.stream_ids[p.rank];
    const int step = task(p).step;
    if (step == kAllBuffers) return me.caller;
    const auto& [dsts, srcs, by] = plan_.steps[step];
    if (srcs.size() > 1 || dsts.size() > 1) return me.worker;
    if (dsts[0].buffer == Buffer::host) return me.sender;
    return srcs[0].buffer == Buffer::host ? me.receiver : me.worker;
  }

  // What a task really writes: in place, a copy finds some destinations done.
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

  // One per stream that has anything to do, by stream.
  std::vector<ScheduledLaunch> grouped(const std::vector<TaskId>& level) const {
    std::vector<ScheduledLaunch> issues;
    for (int s = 0; s < at_.streams; ++s) issues.push_back({s, {}});
    for (TaskId p : level)
      if (!written(p).empty()) issues[stream(p)].tasks.push_back(p);
    std::erase_if(issues, [](const ScheduledLaunch& issue) { return issue.tasks.empty(); });
    return issues;
  }

  template <class F>
  void each(const Slices& slices, F&& f) {
    for (const Slice& s : slices)
      each_cell(plan_, compiled_.in_place, s, [&](int c) { f(cells_[c]); });
  }

  // Earlier issues with a conflicting access. Tasks of one level have none with each other.
  std::vector<int> wanted(const ScheduledLaunch& issue) {
    std::vector<int> found;
    for (TaskId p : issue.tasks) {
      each(reads(plan_, task(p)), [&](LastStreamAccess& c) { found.push_back(c.writer); });
      each(written(p), [&](LastStreamAccess& c) {
        found.push_back(c.writer);
        found.insert(found.end(), c.readers.begin(), c.readers.end());
      });
    }
    return found;
  }

  // Latest first: only a later issue can imply another one.
  std::vector<int> needed(std::vector<int> wanted, StreamClock clock) const {
    std::sort(wanted.begin(), wanted.end(), std::greater<>());
    std::vector<int> kept;
    for (int w : wanted) {
      if (w == kNobody) break;
      const int other = result_[w].stream;
      if (clock[other] >= then_[w][other]) continue;
      kept.push_back(w);
      join(clock, then_[w]);
    }
    return kept;
  }

  // D streams that each wait for D - 1 others are D^2 waits; if one waits for all and all for that
  // one, it is 2 D.
  void join_through_hub(std::vector<ScheduledLaunch>& issues) {
    if (at_.hub == kNoHub) return;
    std::vector<int> all;
    int joining = 0;
    for (const ScheduledLaunch& issue : issues) {
      if (issue.after.size() < 2) continue;
      all.insert(all.end(), issue.after.begin(), issue.after.end());
      ++joining;
    }
    const std::size_t pairs = all.size();
    ScheduledLaunch hub{at_.hub, {}, needed(std::move(all), now_[at_.hub])};
    if (hub.after.size() + joining >= pairs) return;
    const int self = static_cast<int>(result_.size());
    commit(std::move(hub));
    for (ScheduledLaunch& issue : issues)
      if (issue.after.size() >= 2) issue.after = {self};
  }

  void commit(ScheduledLaunch issue) {
    const int self = static_cast<int>(result_.size());
    StreamClock& clock = now_[issue.stream];
    for (int w : issue.after) {
      join(clock, then_[w]);
      result_[w].recorded = true;
    }
    ++clock[issue.stream];
    then_.push_back(clock);
    for (TaskId p : issue.tasks)
      each(reads(plan_, task(p)), [&](LastStreamAccess& c) {
        if (c.readers.empty() || c.readers.back() != self) c.readers.push_back(self);
      });
    for (TaskId p : issue.tasks) each(written(p), [&](LastStreamAccess& c) { c = {self, {}}; });
    result_.push_back(std::move(issue));
  }

  const Plan& plan_;
  const Compiled& compiled_;
  const StreamMap& at_;
  std::vector<LastStreamAccess> cells_;
  std::vector<StreamClock> now_;   // [stream]
  std::vector<StreamClock> then_;  // [issue]: of its stream, behind it
  Schedule result_;
};

}  // namespace

Schedule schedule(const Compiled& compiled, const StreamMap& at) {
  check(compiled.plan, at);
  return Scheduling(compiled, at).run();
}

}  // namespace pycollect::cuda
