// Binds plans, programs, the registry of algorithms and the analysis of plans to Python.
//
// In Python, plans are values that are built from tuples and read as tuples. A slice is (rank, "in"
// | "out" | "tmp" | "host", first chunk, chunks), and a step is (destinations, sources, rank that
// runs it or -1 for the first destination's). A program can be copied without one of its waits, so
// that tests can check that find_races detects the race.
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../analysis/predict.h"
#include "../analysis/races.h"
#include "../plan/error.h"
#include "../plan/offsets.h"
#include "../plan/select.h"
#include "../plan/verify.h"
#include "bindings.h"
#include "from_python.h"

namespace pycollect {
namespace {

namespace py = pybind11;

using SliceTuple = std::tuple<int, std::string, int, int>;
using StepTuple = std::tuple<std::vector<SliceTuple>, std::vector<SliceTuple>, int>;
using TaskTuple = std::tuple<int, int, std::vector<std::pair<int, int>>>;
using TimeSpanTuple = std::tuple<int, int, double, double>;

Buffer buffer_of(const std::string& name) {
  for (int b = 0; b < kBuffers; ++b)
    if (name == kBufferNames[b]) return static_cast<Buffer>(b);
  throw std::invalid_argument(
      text("there is no buffer '", name, "'; choose one of 'in', 'out', 'tmp', 'host'"));
}

Slice slice_of(const SliceTuple& t) {
  return {std::get<0>(t), buffer_of(std::get<1>(t)), std::get<2>(t), std::get<3>(t)};
}

Slices slices_of(const std::vector<SliceTuple>& side) {
  Slices slices;
  for (const SliceTuple& t : side) slices.push_back(slice_of(t));
  return slices;
}

std::vector<SliceTuple> tuples_of(const Slices& slices) {
  std::vector<SliceTuple> side;
  for (const Slice& s : slices)
    side.emplace_back(s.rank, kBufferNames[static_cast<int>(s.buffer)], s.first, s.count);
  return side;
}

Plan plan_of(int world, int chunks, const std::vector<StepTuple>& steps) {
  Plan plan{world, chunks};
  for (const auto& [dsts, srcs, by] : steps) plan.fold(slices_of(dsts), slices_of(srcs), by);
  check(plan, false);
  return plan;
}

py::tuple steps_of(const Plan& plan) {
  py::tuple steps(plan.steps.size());
  for (std::size_t i = 0; i < plan.steps.size(); ++i) {
    const auto& [dsts, srcs, by] = plan.steps[i];
    steps[i] = py::make_tuple(py::tuple(py::cast(tuples_of(dsts))),
                              py::tuple(py::cast(tuples_of(srcs))), by);
  }
  return steps;
}

DType dtype_named(const std::string& dtype) {
  for (std::size_t i = 0; i < kDTypeNames.size(); ++i)
    if (dtype == kDTypeNames[i]) return static_cast<DType>(i);
  throw TypeError(text("there is no dtype '", dtype, "'; use a name such as 'float32'"));
}

// A plan and its program in one object, so that neither can be used with another's.
struct Lowered {
  Plan plan;
  bool in_place;
  Program program;

  Lowered(const Plan& p, bool in_place, const std::string& level_policy)
      : plan(p), in_place(in_place) {
    check(plan, in_place);
    program = lower(plan, in_place, level_policy_of(level_policy));
  }

  std::vector<std::vector<TaskTuple>> tasks() const {
    std::vector<std::vector<TaskTuple>> all(program.size());
    for (std::size_t r = 0; r < program.size(); ++r)
      for (const Task& task : program[r]) {
        std::vector<std::pair<int, int>> waits;
        for (Wait w : task.waits) waits.emplace_back(w.rank, w.count);
        all[r].emplace_back(task.step, task.level, std::move(waits));
      }
    return all;
  }

  std::vector<std::vector<std::pair<int, int>>> by_level() const {
    std::vector<std::vector<std::pair<int, int>>> all;
    for (const auto& level : levels(program)) {
      all.emplace_back();
      for (TaskId p : level) all.back().emplace_back(p.rank, p.index);
    }
    return all;
  }

  Task& task(Rank rank, int index) {
    require(rank >= 0 && rank < plan.world && index >= 0 &&
                index < static_cast<int>(program[rank].size()),
            "there is no task ", index, " of rank ", rank);
    return program[rank][index];
  }

  Lowered without_wait(Rank rank, int index, int wait) const {
    Lowered copy = *this;
    auto& waits = copy.task(rank, index).waits;
    require(wait >= 0 && wait < static_cast<int>(waits.size()), "task ", index, " of rank ", rank,
            " has ", waits.size(), " waits and no wait ", wait);
    waits.erase(waits.begin() + wait);
    return copy;
  }

  Lowered with_wait(Rank rank, int index, std::pair<int, int> wait) const {
    Lowered copy = *this;
    copy.task(rank, index).waits.push_back({wait.first, wait.second});
    return copy;
  }
};

auto verify_(const std::string& collective, const Plan& plan, Rank root, bool in_place,
             std::string_view order) {
  const Verification v =
      verify(collective_of(collective), plan, root, in_place, order_named(order, "verify"));
  return std::pair(v.right() ? py::object(py::none()) : py::object(py::str(v.defect)),
                   name(v.order));
}

auto predict_(const Lowered& p, double bytes, const std::array<double, 4>& model) {
  const auto [alpha, port, memory, bridge] = model;
  const Prediction done = predict(p.plan, p.program, bytes, {alpha, port, memory, bridge});
  std::vector<TimeSpanTuple> spans;
  spans.reserve(done.spans.size());
  for (const TimeSpan& s : done.spans) spans.emplace_back(s.rank, s.step, s.start, s.end);
  return std::pair(done.seconds, std::move(spans));
}

py::dict models_() {
  py::dict all;
  for (const auto& [name, m] : models())
    all[name] = py::make_tuple(m.alpha, m.port, m.memory, m.bridge);
  return all;
}

void bind_plans(py::module_& m) {
  py::class_<Plan>(m, "Plan")
      .def(py::init(&plan_of), py::arg("world"), py::arg("chunks"), py::arg("steps"))
      .def_readonly("world", &Plan::world)
      .def_readonly("chunks", &Plan::chunks)
      .def_property_readonly("steps", &steps_of)
      .def("check", &check, py::arg("in_place"))
      .def("finishes", &finishes, py::arg("in_place"));
  py::class_<Lowered>(m, "Program")
      .def(py::init<const Plan&, bool, const std::string&>(), py::arg("plan"), py::arg("in_place"),
           py::arg("level_policy") = "any")
      .def_readonly("plan", &Lowered::plan)
      .def_readonly("in_place", &Lowered::in_place)
      .def_property_readonly("tasks", &Lowered::tasks)
      .def_property_readonly("levels", &Lowered::by_level)
      .def("without_wait", &Lowered::without_wait, py::arg("rank"), py::arg("index"),
           py::arg("wait"))
      .def("with_wait", &Lowered::with_wait, py::arg("rank"), py::arg("index"), py::arg("wait"));
  py::class_<PlanOffsets>(m, "PlanOffsets")
      .def(py::init<const Plan&, const Sizes&, std::size_t>(), py::arg("plan"), py::arg("blocks"),
           py::arg("align") = 1)
      .def("set", [](PlanOffsets& o, Rank rank, const std::string& buffer,
                     const Sizes& blocks) { o.set(rank, buffer_of(buffer), blocks); })
      .def("begin", [](const PlanOffsets& o, const SliceTuple& s) { return o.begin(slice_of(s)); })
      .def("count", [](const PlanOffsets& o, const SliceTuple& s) { return o.count(slice_of(s)); })
      .def("total", [](const PlanOffsets& o, Rank rank,
                       const std::string& buffer) { return o.total(rank, buffer_of(buffer)); })
      .def("check", &PlanOffsets::check, py::arg("plan"));
}

void bind_registry(py::module_& m) {
  // The registry owns the algorithms and never frees them, so Python must not either.
  py::class_<Algorithm, std::unique_ptr<Algorithm, py::nodelete>>(m, "Algorithm")
      .def_readonly("name", &Algorithm::name)
      .def_property_readonly("collective", [](const Algorithm& a) { return name(a.collective); })
      .def_readonly("cost", &Algorithm::cost)
      .def_property_readonly("order", [](const Algorithm& a) { return name(a.order); })
      .def_readonly("in_place", &Algorithm::in_place)
      .def(
          "keeps_contract",
          [](const Algorithm& a, const std::string& dtype) {
            return a.keeps_contract(dtype_named(dtype));
          },
          py::arg("dtype"))
      .def(
          "plan",
          [](const Algorithm& a, int world, Rank root, int pieces) {
            return a({world, root, pieces});
          },
          py::arg("world"), py::arg("root") = 0, py::arg("pieces") = 4);
  m.def(
      "algorithms",
      [](py::handle collective) { return algorithms(collective_from(collective, "algorithms")); },
      py::arg("collective"), py::return_value_policy::reference);
  m.def(
      "find_algorithm",
      [](py::handle collective, py::handle name) -> const Algorithm& {
        const std::string_view named =
            string_from(name, "plan", "algorithm", "a name out of pycollect.algorithms(), or None");
        return find(collective_from(collective, "plan"), named);
      },
      py::arg("collective"), py::arg("name"), py::return_value_policy::reference);
  m.def(
      "default_algorithm",
      [](py::handle collective, int world, std::size_t nbytes) {
        const SelectionKey key{collective_from(collective, "plan"), world, nbytes, DType::f32,
                               false};
        return choose(key, "").algorithm->name;
      },
      py::arg("collective"), py::arg("world"), py::arg("nbytes"));
  m.attr("COLLECTIVES") = py::tuple(py::cast(kCollectiveNames));
}

}  // namespace

Collective collective_from(py::handle name, const char* call) {
  return collective_of(string_from(name, call, "collective", "a name such as 'all_reduce'"));
}

LevelPolicy level_policy_of(const std::string& name) {
  require(name == "any" || name == "one_task", "there is no level_policy '", name,
          "'; choose 'any' or 'one_task'");
  return name == "any" ? LevelPolicy::any : LevelPolicy::one_task;
}

void bind_plan(py::module_& m) {
  bind_plans(m);
  bind_registry(m);
  py::class_<RaceReport>(m, "RaceReport")
      .def_property_readonly("defect",
                             [](const RaceReport& r) {
                               return r.defect.empty() ? py::object(py::none())
                                                       : py::object(py::str(r.defect));
                             })
      .def_readonly("races", &RaceReport::races)
      .def_readonly("waits", &RaceReport::waits)
      .def_readonly("deadlock", &RaceReport::deadlock)
      .def_readonly("is_barrier", &RaceReport::is_barrier);
  m.def(
      "find_races", [](const Lowered& p) { return find_races(p.plan, p.program, p.in_place); },
      py::arg("program"));
  m.def("verify", &verify_, py::arg("collective"), py::arg("plan"), py::arg("root"),
        py::arg("in_place"), py::arg("order") = "rank");
  m.def("predict", &predict_, py::arg("program"), py::arg("bytes"), py::arg("model"));
  m.def("models", &models_);
}

}  // namespace pycollect
