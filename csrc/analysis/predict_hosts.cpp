// The activities of a run are the ranks' tasks and the messages between hosts. Each starts when the
// last activity that it depends on has ended, and the earliest one reserves memories and links
// first. Runs follow each other as in the program runs (csrc/rank_executor/program_run.cpp).
#include "predict_hosts.h"

#include <algorithm>
#include <cmath>
#include <queue>
#include <utility>

#include "../plan/cell_map.h"
#include "../plan/error.h"
#include "../plan/passes.h"

namespace pycollect {
namespace {

constexpr int kNone = -1;

// Runs are alike, so a long call is simulated for this many, and its other runs take as long as the
// last one of them. By then the pipeline is full.
constexpr int64_t kSimulatedRuns = 6;

// Bytes of the message with which a host tells each other one its call: header and description.
constexpr double kAgreementBytes = 256;

struct Activity {
  Rank rank;  // the one that runs the task, or receives the message
  int step;   // of the plan, or kInOutBuffers
  bool message;
  bool last;  // the rank's exit
};

struct Dependence {
  int from, to;  // activities
  double delay;  // seconds between the end of one and the start of the other
};

// One run: its activities, and which of them depends on which.
class RunGraph {
 public:
  RunGraph(const LoweredWorldView& world, const CostModel& model) : world_(world), model_(model) {
    for (Rank r = 0; r < plan().world; ++r) {
      first_.push_back(size());
      for (const Task& task : world.program[r]) activities_.push_back({r, task.step, false, false});
      activities_.back().last = true;
    }
    task_of_.resize(plan().steps.size());
    for (int a = 0; a < size(); ++a)
      if (activities_[a].step >= 0) task_of_[activities_[a].step] = a;
    for (Rank r = 0; r < plan().world; ++r) add_tasks(r);
    add_messages();
    index();
  }

  int size() const { return static_cast<int>(activities_.size()); }
  const Activity& operator[](int a) const { return activities_[a]; }
  int entry(Rank r) const { return first_[r]; }
  const std::vector<int>& waiting() const { return waiting_; }  // [activity]: on how many others
  template <class F>
  void each_after(int a, F&& f) const {
    for (int i = begin_[a]; i < begin_[a + 1]; ++i) f(sorted_[i]);
  }

 private:
  const Plan& plan() const { return world_.view.plan; }
  double signal(Rank from, Rank to) const { return from == to ? 0 : model_.alpha; }

  void add_tasks(Rank r) {
    const auto& tasks = world_.program[r];
    for (int i = 0; i < static_cast<int>(tasks.size()); ++i) {
      const int self = first_[r] + i;
      if (i > 0) all_.push_back({self - 1, self, 0});
      for (const Wait w : tasks[i].waits)
        all_.push_back({first_[w.rank] + w.count - 1, self, model_.alpha});
    }
  }

  // A message starts when its data has been written and its receive has been posted: when the
  // receiver enters the run, or has finished its earlier tasks. The sender's run ends when the
  // message has left.
  void add_messages() {
    CellMap<int> writer(plan(), kNone);  // the last step
    for (int i = 0; i < static_cast<int>(plan().steps.size()); ++i) {
      const Step& step = plan().steps[i];
      const auto each = [&](const Slice& s, auto&& f) { each_cell(plan(), world_.in_place, s, f); };
      if (const auto& transfer = world_.view.transfers[i]) {
        const int task = task_of_[i], message = size();
        const Rank me = step.owner(), sender = transfer->peer;
        activities_.push_back({me, i, true, false});
        each(step.srcs[0], [&](int c) {
          const int from = task_of_[writer[c]];
          all_.push_back({from, message, signal(activities_[from].rank, sender)});
        });
        all_.push_back({transfer->early ? entry(me) : task - 1, message, 0});
        all_.push_back({message, task, 0});
        all_.push_back({message, exit(sender), -model_.latency});
      }
      for (const Slice& d : step.dsts) each(d, [&](int c) { writer[c] = i; });
    }
  }

  int exit(Rank r) const { return first_[r] + static_cast<int>(world_.program[r].size()) - 1; }

  void index() {
    waiting_.resize(size());
    begin_.resize(size() + 1);
    for (const Dependence& d : all_) ++waiting_[d.to], ++begin_[d.from + 1];
    for (int a = 0; a < size(); ++a) begin_[a + 1] += begin_[a];
    sorted_.resize(all_.size());
    std::vector<int> next(begin_.begin(), begin_.end() - 1);
    for (const Dependence& d : all_) sorted_[next[d.from]++] = d;
  }

  const LoweredWorldView& world_;
  const CostModel& model_;
  std::vector<Activity> activities_;
  std::vector<int> first_;    // [rank]: its entry
  std::vector<int> task_of_;  // [step]
  std::vector<Dependence> all_, sorted_;
  std::vector<int> begin_, waiting_;
};

// What the ranks of a host share: each is free for the next bytes at a time in seconds.
struct HostResources {
  double memory = 0, sends = 0, receives = 0;
};

class Simulation {
 public:
  Simulation(const LoweredWorldView& world, int64_t runs, double chunk, const CostModel& model)
      : world_(world),
        runs_(runs),
        chunk_(chunk),
        model_(model),
        graph_(world, model),
        hosts_(world.hosts.count()),
        ends_(runs) {
    const int n = graph_.size();
    for (int64_t k = 0; k < runs; ++k)
      waiting_.insert(waiting_.end(), graph_.waiting().begin(), graph_.waiting().end());
    ready_.resize(runs * n);
    steps_ = static_cast<int64_t>(world.view.plan.steps.size()) + 2 * world.view.plan.world;
    spans_.resize(runs * steps_);
    // A rank begins a run when it has ended the one before, and all ranks of its host the one
    // before that, in whose staging buffer the data is to go.
    for (int64_t k = 1; k < runs; ++k)
      for (Rank r = 0; r < world.view.plan.world; ++r)
        waiting_[k * n + graph_.entry(r)] = 1 + (k > 1 ? ranks_beside(r) : 0);
  }

  // Returns the ends of the runs.
  const std::vector<double>& run(double start) {
    for (Rank r = 0; r < world_.view.plan.world; ++r) queue_.push({start, graph_.entry(r)});
    while (!queue_.empty()) {
      const auto [begin, event] = queue_.top();
      queue_.pop();
      finish(event, begin, perform(graph_[static_cast<int>(event % graph_.size())], begin));
    }
    return ends_;
  }
  std::vector<TimeSpan> take_spans() { return std::move(spans_); }

 private:
  int ranks_beside(Rank r) const {
    return static_cast<int>(world_.hosts.ranks(world_.hosts.of(r)).size());
  }

  double perform(const Activity& activity, double start) {
    if (activity.step < 0) return start;
    const Step& step = world_.view.plan.steps[activity.step];
    if (!world_.view.transfers[activity.step]) return fold(step, start);
    return activity.message ? send(step, start) : start;
  }

  // Passes bytes through a resource, after those that it has been given before.
  static double pass(double& free_at, double start, double seconds) {
    return free_at = std::max(free_at, start) + seconds;
  }

  double fold(const Step& step, double start) {
    const double bytes = chunk_ * step.dsts.front().count;
    const double reads = bytes * static_cast<double>(step.srcs.size());
    const double writes = bytes * static_cast<double>(step.dsts.size());
    HostResources& host = hosts_[world_.hosts.of(step.owner())];
    return std::max(start + std::max(reads, writes) / model_.port,
                    pass(host.memory, start, (reads + writes) / model_.memory));
  }

  // Both ends copy the data between their memory and that of the network's driver.
  double send(const Step& step, double start) {
    const double bytes = chunk_ * step.dsts.front().count;
    HostResources& from = hosts_[world_.hosts.of(step.srcs[0].rank)];
    HostResources& to = hosts_[world_.hosts.of(step.owner())];
    const double on_link = bytes / model_.network, copied = 2 * bytes / model_.memory;
    return model_.latency +
           std::max({pass(from.memory, start, copied), pass(from.sends, start, on_link),
                     pass(to.receives, start, on_link), pass(to.memory, start, copied)});
  }

  void finish(int64_t event, double start, double end) {
    const int n = graph_.size();
    const int64_t k = event / n;
    const auto index = static_cast<int>(event % n);
    const Activity& activity = graph_[index];
    note(k, activity, start, end);
    graph_.each_after(index, [&](const Dependence& d) { release(k * n + d.to, end + d.delay); });
    if (!activity.last) return;
    ends_[k] = std::max(ends_[k], end);
    if (k + 1 < runs_) release((k + 1) * n + graph_.entry(activity.rank), end);
    if (k + 2 >= runs_) return;
    for (const Rank other : world_.hosts.ranks(world_.hosts.of(activity.rank)))
      release((k + 2) * n + graph_.entry(other), end + model_.alpha);
  }

  void release(int64_t event, double time) {
    ready_[event] = std::max(ready_[event], time);
    if (--waiting_[event] == 0) queue_.push({ready_[event], event});
  }

  void note(int64_t k, const Activity& a, double start, double end) {
    const int world = world_.view.plan.world;
    const bool entry = a.step < 0 && !a.last;
    if (a.step >= 0 && world_.view.transfers[a.step] && !a.message) return;
    const int64_t at = entry ? a.rank : a.step >= 0 ? world + a.step : steps_ - world + a.rank;
    spans_[k * steps_ + at] = {a.rank, std::max(a.step, kAllBuffers), start, end};
  }

  const LoweredWorldView& world_;
  const int64_t runs_;
  const double chunk_;  // bytes
  const CostModel& model_;
  const RunGraph graph_;
  std::vector<HostResources> hosts_;
  // An event is an activity of a run: run * activities + activity.
  std::vector<int> waiting_;   // [event]: the number of events before it that have not ended
  std::vector<double> ready_;  // [event]: the end of the last of them
  using TimedEvent = std::pair<double, int64_t>;
  std::priority_queue<TimedEvent, std::vector<TimedEvent>, std::greater<>> queue_;
  std::vector<double> ends_;  // [run]
  std::vector<TimeSpan> spans_;
  int64_t steps_ = 0;  // spans of one run
};

// When the ranks may begin: the ranks of each host meet, and the first ones tell all other hosts
// the call. A small call's data goes along with that. The sizes of an irregular call are compared
// by two hosts each, whose first ranks then tell all others the result.
double agreement(const LoweredWorldView& world, const CostModel& model) {
  const double round = model.latency + (world.hosts.count() - 1) * kAgreementBytes / model.network;
  const double result = world.irregular ? round : 0;
  return result + (world.view.packs ? model.alpha : 2 * model.alpha + round);
}

// Lowers the steps of each host by themselves, as its ranks do: they know no waits of other hosts.
Program lower_by_host(const Plan& plan, bool in_place, const Hosts& hosts) {
  std::vector<Plan> parts;
  std::vector<std::vector<int>> steps(hosts.count());  // [host][step of its part]: of the plan
  for (int h = 0; h < hosts.count(); ++h)
    parts.push_back({static_cast<int>(hosts.ranks(h).size()), plan.chunks});
  for (int i = 0; i < static_cast<int>(plan.steps.size()); ++i) {
    const Rank me = plan.steps[i].owner();
    const auto here = [&](const Slices& slices) {
      Slices own;
      for (const Slice& s : slices)
        if (hosts.of(s.rank) == hosts.of(me))
          own.push_back({hosts.index(s.rank), s.buffer, s.first, s.count});
      return own;
    };
    parts[hosts.of(me)].fold(here(plan.steps[i].dsts), here(plan.steps[i].srcs), hosts.index(me));
    steps[hosts.of(me)].push_back(i);
  }
  Program program(plan.world);
  for (int h = 0; h < hosts.count(); ++h) {
    Program part = lower(parts[h], in_place, LevelPolicy::any, kInOutBuffers);
    for (const Rank r : hosts.ranks(h)) {
      program[r] = std::move(part[hosts.index(r)]);
      for (Task& task : program[r]) {
        if (task.step >= 0) task.step = steps[h][task.step];
        for (Wait& w : task.waits) w.rank = hosts.ranks(h)[w.rank];
      }
    }
  }
  return program;
}

}  // namespace

LoweredWorldView::LoweredWorldView(const Plan& plan, bool in_place_, bool irregular_,
                                   const Hosts& hosts_, HostSenders senders)
    : hosts(hosts_),
      in_place(in_place_),
      irregular(irregular_),
      view(world_view(for_processes(plan, in_place, false, false), in_place, hosts, senders)),
      program(lower_by_host(view.plan, in_place, hosts)) {}

int64_t runs(const HostView& view, const HostsCall& call) {
  require(call.buffer_bytes > 0, "a staging buffer has more than ", call.buffer_bytes, " bytes");
  const double regions = std::max(1, view.cells + view.partial_cells);
  const double needed = call.bytes / view.chunks * regions / call.buffer_bytes;
  return std::max<int64_t>(1, std::llround(std::ceil(needed)));
}

Prediction predict(const LoweredWorldView& world, const HostsCall& call, const CostModel& model) {
  check_model(call.bytes, model);
  const int64_t all = runs(world.view, call), simulated = std::min(all, kSimulatedRuns);
  const double chunk = call.bytes / world.view.chunks / static_cast<double>(all);
  Simulation simulation(world, simulated, chunk, model);
  const std::vector<double>& ends = simulation.run(agreement(world, model));
  double seconds = ends.back();
  if (all > simulated)
    seconds += static_cast<double>(all - simulated) * (ends.back() - ends[simulated - 2]);
  return {seconds, simulation.take_spans()};
}

}  // namespace pycollect
