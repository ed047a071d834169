// Binds emulated runs, the peer-access cache, staging, and schedules. A schedule is a list of
// launches: (stream, tasks, indices of the launches to wait for, whether an event is recorded).
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../../analysis/predict.h"
#include "../../cuda/peer_access.h"
#include "../../plan/error.h"
#include "../../plan/passes.h"
#include "../../torch/bindings.h"
#include "../emulated_run.h"
#include "bind.h"

namespace pycollect {
namespace cuda {
namespace {

namespace py = pybind11;

using StreamIdsTuple = std::array<int, 3>;  // of a rank: caller, d2h, h2d

// Each launch: stream, tasks as (rank, index), launches to wait for, whether an event is recorded.
py::list tuples_of(const Schedule& schedule) {
  py::list all;
  for (const ScheduledLaunch& issue : schedule) {
    py::list tasks;
    for (TaskId p : issue.tasks) tasks.append(py::make_tuple(p.rank, p.index));
    all.append(py::make_tuple(issue.stream, tasks, issue.after, issue.recorded));
  }
  return all;
}

StreamMap stream_map_of(const std::vector<StreamIdsTuple>& stream_ids, int streams) {
  StreamMap at{{}, streams};
  for (const auto& [caller, d2h, h2d] : stream_ids) at.stream_ids.push_back({caller, d2h, h2d});
  return at;
}

auto emulated_run(const Plan& plan, bool in_place, const std::vector<Device>& devices,
                  const std::string& level_policy, bool callers_apart, bool copy_streams,
                  bool peers, bool host_waits, int pieces, const std::string& dtype,
                  const std::string& op, int bindings, const EmulatedRun* machine_of,
                  std::pair<std::size_t, int> ring) {
  return std::make_unique<EmulatedRun>(
      TestCase{.plan = plan,
               .in_place = in_place,
               .level_policy = level_policy_of(level_policy),
               .devices = devices,
               .callers_apart = callers_apart,
               .copy_streams = copy_streams,
               .host_waits = host_waits,
               .peers = peers,
               .pieces = pieces,
               .dtype = static_cast<DType>(find_name("dtype", dtype, kDTypeNames)),
               .op = static_cast<ReduceOp>(find_name("op", op, kReduceOpNames)),
               .bindings = bindings,
               .ring = {ring.first, ring.second}},
      machine_of);
}

// Returns the emulator's counters as a collections.Counter.
py::object counts(const Emulator& cuda) {
  return py::module_::import("collections").attr("Counter")(cuda.counters());
}

// Returns the numbers of the waits whose removal causes no race.
std::vector<int> redundant_waits(const EmulatedRun& r) {
  const RaceDetector detector = r.race_detector();
  std::vector<int> found;
  for (int i = 0; i < detector.waits(); ++i)
    if (detector.race(i).empty()) found.push_back(i);
  return found;
}

void bind_runs(py::module_& m) {
  py::class_<EmulatedRun>(m, "EmulatedRun")
      .def(py::init(&emulated_run), py::arg("plan"), py::arg("in_place"), py::arg("devices"),
           py::kw_only(), py::arg("level_policy") = "any", py::arg("callers_apart") = false,
           py::arg("copy_streams") = false, py::arg("peers") = true, py::arg("host_waits") = true,
           py::arg("pieces") = 1, py::arg("dtype") = "float32", py::arg("op") = "sum",
           py::arg("bindings") = 1, py::arg("machine_of") = nullptr,
           py::arg("ring") = std::pair<std::size_t, int>(256, 3))
      .def("run", &EmulatedRun::run, py::arg("calls") = 1, py::arg("capture") = false)
      .def("fail_call", &EmulatedRun::fail_call, py::arg("after"))
      .def("replace_streams", &EmulatedRun::replace_streams, py::arg("callers_apart"))
      .def("run_half_captured", &EmulatedRun::run_half_captured)
      .def("skip_wait", &EmulatedRun::skip_wait, py::arg("number"))
      .def_property_readonly("race",
                             [](const EmulatedRun& r) { return words(r.race_detector().race()); })
      .def_property_readonly("waits",
                             [](const EmulatedRun& r) { return r.race_detector().waits(); })
      .def("redundant_waits", &redundant_waits)
      .def(
          "mismatch", [](EmulatedRun& r, int64_t seed) { return words(r.mismatch(seed)); },
          py::arg("seed") = -1)
      .def_property_readonly("counts", [](EmulatedRun& r) { return counts(r.cuda()); })
      .def_property_readonly("chunk_sizes",
                             [](const EmulatedRun& r) {
                               return std::array{"uneven", "each",
                                                 "even"}[static_cast<int>(r.chunk_sizes())];
                             })
      .def_property_readonly("plan", [](const EmulatedRun& r) { return r.compiled().plan; })
      .def_property_readonly("levels",
                             [](const EmulatedRun& r) { return r.compiled().levels.size(); });
}

void bind_peers(py::module_& m) {
  py::class_<PeerAccessCache>(m, "PeerAccessCache")
      .def(py::init([](std::function<bool(Device, Device)> query,
                       std::function<std::string(Device, Device)> test,
                       std::function<void(const std::string&)> warn) {
             return std::make_unique<PeerAccessCache>(
                 PeerAccessCache::Callbacks{std::move(query), std::move(test), std::move(warn)});
           }),
           py::arg("query"), py::arg("test"), py::arg("warn"))
      .def("works",
           [](PeerAccessCache& p, Device from, Device to) { return p.access(from, to).works(); });
}

}  // namespace
}  // namespace cuda

void bind_emulated_run(pybind11::module_& m) {
  using namespace cuda;
  bind_runs(m);
  bind_peers(m);
  m.def(
      "stage",
      [](const Plan& plan, bool in_place, std::vector<bool> on_host,
         std::vector<std::vector<bool>> directly, int pieces) {
        return stage(plan, in_place, {std::move(on_host), std::move(directly)}, pieces);
      },
      py::arg("plan"), py::arg("in_place"), py::arg("on_host"), py::arg("directly"),
      py::arg("pieces") = 1);
  m.def(
      "schedule",
      [](const Plan& plan, bool in_place, const std::string& level_policy,
         const std::vector<StreamIdsTuple>& stream_ids, int streams) {
        return tuples_of(schedule(compile(plan, in_place, level_policy_of(level_policy)),
                                  stream_map_of(stream_ids, streams)));
      },
      py::arg("plan"), py::arg("in_place"), py::arg("level_policy"), py::arg("stream_ids"),
      py::arg("streams"));
  m.def(
      "predict_streams",
      [](const Plan& plan, bool in_place, const std::string& level_policy,
         const std::vector<StreamIdsTuple>& stream_ids, int streams,
         const std::vector<int>& devices, double bytes, const std::array<double, 5>& model) {
        const auto [alpha, port, memory, bridge, host] = model;
        return predict(compile(plan, in_place, level_policy_of(level_policy)),
                       stream_map_of(stream_ids, streams), devices, bytes,
                       {alpha, port, memory, bridge, host});
      },
      py::arg("plan"), py::arg("in_place"), py::arg("level_policy"), py::arg("stream_ids"),
      py::arg("streams"), py::arg("devices"), py::arg("bytes"), py::arg("model"));
}

}  // namespace pycollect
