// Processes tasks in the order of the plan, in which a task waits only for earlier ones. Each
// resource (a memory, a port, a bridge) moves the tasks' bytes in that order, and a task ends when
// the last resource that it uses has moved its bytes.
#include "predict.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "../plan/error.h"

namespace pycollect {
namespace {

constexpr int kHostMemory = -1;

class Traffic {
 public:
  // `devices`: [rank], negative for a rank in host memory.
  Traffic(const Plan& plan, std::vector<int> devices, double bytes, const CostModel& model)
      : plan_(plan),
        devices_(std::move(devices)),
        n_(*std::max_element(devices_.begin(), devices_.end()) + 1),
        chunk_(bytes / plan.chunks),
        model_(model),
        memory_(n_),
        port_out_(n_),
        port_in_(n_),
        bridge_(2) {}

  // Returns the end of a task that may start at `start`.
  double end(const Task& task, Rank me, double start) {
    if (task.step == kAllBuffers) return start;
    const Step& step = plan_.steps[task.step];
    const int here = devices_[me];
    double finish = start;
    for (const Slice& s : step.srcs) finish = std::max(finish, move(device(s), here, s, start));
    for (const Slice& d : step.dsts) finish = std::max(finish, move(here, device(d), d, start));
    return finish;
  }

 private:
  int device(const Slice& s) const {
    return s.buffer == Buffer::host ? kHostMemory : std::max(devices_[s.rank], kHostMemory);
  }

  // Moves the bytes of `s` between its memory and registers of the device that runs the step.
  double move(int from, int to, const Slice& s, double start) {
    const double bytes = chunk_ * s.count;
    double finish = start;
    auto pass = [&](double& busy_until, double rate) {
      busy_until = std::max(busy_until, start) + bytes / rate;
      finish = std::max(finish, busy_until);
    };
    if (device(s) >= 0) pass(memory_[device(s)], model_.memory);
    if (from == to) return finish;
    if (from >= 0) pass(port_out_[from], model_.port);
    if (to >= 0) pass(port_in_[to], model_.port);
    const bool left = 2 * from < n_, crosses = left != (2 * to < n_);
    if (from >= 0 && to >= 0 && crosses && model_.bridge > 0) pass(bridge_[left], model_.bridge);
    return finish;
  }

  const Plan& plan_;
  std::vector<int> devices_;
  int n_;
  double chunk_;  // bytes
  CostModel model_;
  std::vector<double> memory_, port_out_, port_in_;  // [device]: time in seconds when it is free
  std::vector<double> bridge_;                       // [direction]
};

// Returns every task in the order of the plan: entries, steps, exits.
std::vector<TaskId> as_written(const Plan& plan, const Program& program) {
  require(static_cast<int>(program.size()) == plan.world, "a program of ", program.size(),
          " ranks does not belong to a plan of ", plan.world);
  struct Written {
    int when;
    TaskId place;
  };
  std::vector<Written> all;
  const int steps = static_cast<int>(plan.steps.size());
  for (Rank r = 0; r < plan.world; ++r)
    for (int i = 0; i < static_cast<int>(program[r].size()); ++i) {
      const int step = program[r][i].step;
      require(step >= kAllBuffers && step < steps, "a task names step ", step, " of a plan with ",
              steps);
      all.push_back({step != kAllBuffers ? step : i == 0 ? -1 : steps, {r, i}});
    }
  std::stable_sort(all.begin(), all.end(),
                   [](const Written& a, const Written& b) { return a.when < b.when; });
  std::vector<TaskId> places;
  places.reserve(all.size());
  for (const Written& w : all) places.push_back(w.place);
  return places;
}

}  // namespace

void check_model(double bytes, const CostModel& m) {
  require(std::isfinite(bytes) && bytes >= 0, "bytes must be finite and not negative, not ", bytes);
  require(std::isfinite(m.alpha) && m.alpha >= 0, "alpha is in seconds, finite and not negative, ",
          "not ", m.alpha);
  for (double rate : {m.port, m.memory})
    require(std::isfinite(rate) && rate > 0,
            "port and memory are in bytes per second, finite and above zero, not ", rate);
  require(std::isfinite(m.bridge) && m.bridge >= 0,
          "bridge is in bytes per second, or 0 where there is none, not ", m.bridge);
  require(std::isfinite(m.host) && m.host >= 0, "host is in seconds, finite and not negative, not ",
          m.host);
}

// "nvlink" models eight GPUs of the 2020s behind a switch; "pcie", two sockets with four GPUs each.
const std::vector<NamedCostModel>& models() {
  static const std::vector<NamedCostModel> all{
      {"nvlink", {.alpha = 1.5e-6, .port = 400e9, .memory = 3000e9, .bridge = 0}},
      {"pcie", {.alpha = 3e-6, .port = 24e9, .memory = 800e9, .bridge = 20e9}}};
  return all;
}

Prediction predict(const Plan& plan, const Program& program, double bytes, const CostModel& model) {
  check(plan, false);
  check_model(bytes, model);
  std::vector<int> own(plan.world);
  std::iota(own.begin(), own.end(), 0);
  Traffic traffic(plan, std::move(own), bytes, model);
  std::vector<std::vector<double>> ends(plan.world);
  Prediction result;
  for (TaskId p : as_written(plan, program)) {
    const Task& task = program[p.rank][p.index];
    require(static_cast<int>(ends[p.rank].size()) == p.index, "rank ", p.rank,
            " runs its tasks in another order than the plan");
    double start = ends[p.rank].empty() ? 0 : ends[p.rank].back();
    for (Wait w : task.waits) {
      require(w.rank >= 0 && w.rank < plan.world && w.count >= 1 &&
                  w.count <= static_cast<int>(ends[w.rank].size()),
              "step ", task.step, " waits for task ", w.count, " of rank ", w.rank,
              ", which the plan writes later");
      start = std::max(start, ends[w.rank][w.count - 1] + model.alpha);
    }
    const double end = traffic.end(task, p.rank, start);
    ends[p.rank].push_back(end);
    result.spans.push_back({p.rank, task.step, start, end});
    result.seconds = std::max(result.seconds, end);
  }
  return result;
}

double predict(const CompiledPlan& compiled, const cuda::StreamMap& at,
               const std::vector<int>& devices, double bytes, const CostModel& model) {
  check_model(bytes, model);
  require(static_cast<int>(devices.size()) == compiled.plan.world, "a device for each of ",
          compiled.plan.world, " ranks, not ", devices.size());
  Traffic traffic(compiled.plan, devices, bytes, model);
  std::vector<double> streams(at.streams), ends;
  double host = 0;
  for (const cuda::ScheduledLaunch& issue : cuda::schedule(compiled, at)) {
    const auto task = [&](TaskId p) { return compiled.program[p.rank][p.index]; };
    const bool moves = !issue.tasks.empty() && task(issue.tasks[0]).step != kAllBuffers;
    host += model.host * static_cast<double>(moves + issue.after.size() + issue.recorded);
    double start = std::max(streams[issue.stream], host);
    for (int earlier : issue.after) start = std::max(start, ends[earlier] + model.alpha);
    double end = start;
    for (TaskId p : issue.tasks) end = std::max(end, traffic.end(task(p), p.rank, start));
    ends.push_back(streams[issue.stream] = end);
  }
  return *std::max_element(streams.begin(), streams.end());
}

}  // namespace pycollect
