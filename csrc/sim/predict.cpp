// Tasks are taken in the written order, which every wait points back in. Each resource serves them
// in that order, so a task ends when the slowest thing that its bytes pass has served it.
#include "predict.h"

#include <algorithm>
#include <cmath>

#include "../plan/error.h"

namespace pycollect {
namespace {

void check(double bytes, const Model& m) {
  require(std::isfinite(bytes) && bytes >= 0, "bytes must be finite and not negative, not ", bytes);
  require(std::isfinite(m.alpha) && m.alpha >= 0, "alpha is in seconds, finite and not negative, ",
          "not ", m.alpha);
  for (double rate : {m.port, m.memory})
    require(std::isfinite(rate) && rate > 0,
            "port and memory are in bytes per second, finite and above zero, not ", rate);
  require(std::isfinite(m.bridge) && m.bridge >= 0,
          "bridge is in bytes per second, or 0 where there is none, not ", m.bridge);
}

class Traffic {
 public:
  Traffic(const Plan& plan, double bytes, const Model& model)
      : plan_(plan),
        chunk_(bytes / plan.chunks),
        model_(model),
        memory_(plan.world),
        port_out_(plan.world),
        port_in_(plan.world),
        bridge_(2) {}

  // When does a task end that may start at `start`?
  double end(const Task& task, Rank me, double start) {
    if (task.step == kBoundary) return start;
    const Step& step = plan_.steps[task.step];
    double finish = start;
    for (const Slice& s : step.srcs) finish = std::max(finish, move(s.rank, me, s, start));
    for (const Slice& d : step.dsts) finish = std::max(finish, move(me, d.rank, d, start));
    return finish;
  }

 private:
  // `s` is the end in memory; the other end is a register of whoever runs the step.
  double move(Rank from, Rank to, const Slice& s, double start) {
    const double bytes = chunk_ * s.count;
    auto pass = [&](double& busy_until, double rate) {
      return busy_until = std::max(busy_until, start) + bytes / rate;
    };
    double finish = pass(memory_[s.rank], model_.memory);
    if (from == to) return finish;
    finish =
        std::max({finish, pass(port_out_[from], model_.port), pass(port_in_[to], model_.port)});
    const bool left = 2 * from < plan_.world, crosses = left != (2 * to < plan_.world);
    if (crosses && model_.bridge > 0) finish = std::max(finish, pass(bridge_[left], model_.bridge));
    return finish;
  }

  const Plan& plan_;
  double chunk_;  // bytes
  Model model_;
  std::vector<double> memory_, port_out_, port_in_;  // [rank]: seconds, when it is free again
  std::vector<double> bridge_;                       // [direction]
};

// Every task as the plan was written: entries, steps, exits.
std::vector<Place> as_written(const Plan& plan, const Program& program) {
  require(static_cast<int>(program.size()) == plan.world, "a program of ", program.size(),
          " ranks does not belong to a plan of ", plan.world);
  struct Written {
    int when;
    Place place;
  };
  std::vector<Written> all;
  const int steps = static_cast<int>(plan.steps.size());
  for (Rank r = 0; r < plan.world; ++r)
    for (int i = 0; i < static_cast<int>(program[r].size()); ++i) {
      const int step = program[r][i].step;
      require(step >= kBoundary && step < steps, "a task names step ", step, " of a plan with ",
              steps);
      all.push_back({step != kBoundary ? step : i == 0 ? -1 : steps, {r, i}});
    }
  std::stable_sort(all.begin(), all.end(),
                   [](const Written& a, const Written& b) { return a.when < b.when; });
  std::vector<Place> places;
  places.reserve(all.size());
  for (const Written& w : all) places.push_back(w.place);
  return places;
}

}  // namespace

// NVLink: a switch between eight accelerators of this decade. PCIe: two sockets with four each.
const std::vector<NamedModel>& models() {
  static const std::vector<NamedModel> all{
      {"nvlink", {.alpha = 1.5e-6, .port = 400e9, .memory = 3000e9, .bridge = 0}},
      {"pcie", {.alpha = 3e-6, .port = 24e9, .memory = 800e9, .bridge = 20e9}}};
  return all;
}

Prediction predict(const Plan& plan, const Program& program, double bytes, const Model& model) {
  check(plan, false);
  check(bytes, model);
  Traffic traffic(plan, bytes, model);
  std::vector<std::vector<double>> ends(plan.world);
  Prediction result;
  for (Place p : as_written(plan, program)) {
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

}  // namespace pycollect
