// Plans over several hosts for Python: made from an algorithm and the number of ranks on each host.
#include <pybind11/stl.h>

#include <array>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../analysis/predict_hosts.h"
#include "../plan/error.h"
#include "../plan/select.h"
#include "../plan/verify.h"
#include "bind_plan.h"

namespace pycollect {
namespace {

namespace py = pybind11;

using HostSizes = std::vector<int>;  // [host]: number of ranks, which are consecutive
using ChoiceTuple = std::tuple<std::string, int, bool>;  // algorithm, pieces, first ranks send

// Returns what the executor of processes selects for a call. `named`: as for `choose`.
ChoiceTuple select_over_hosts(const std::string& collective, const HostSizes& sizes,
                              std::size_t nbytes, const std::string& named) {
  const Hosts hosts = Hosts::of_sizes(sizes);
  const SelectionKey key{collective_of(collective), hosts.world(), nbytes, DType::f32, false,
                         Topology::hosts,           &hosts};
  const Choice choice = choose(key, named);
  return {choice.algorithm->name, choice.pieces, choice.senders == HostSenders::first};
}

LoweredWorldView world_view_of(const Algorithm& algorithm, const HostSizes& sizes, Rank root,
                               bool in_place, const std::pair<int, bool>& choice) {
  const Hosts hosts = Hosts::of_sizes(sizes);
  const auto [pieces, first] = choice;
  return LoweredWorldView(algorithm({hosts.world(), root, pieces, &hosts}), in_place, hosts,
                          first ? HostSenders::first : HostSenders::all);
}

py::object verify_world(const LoweredWorldView& world, const std::string& collective, Rank root) {
  const Verification v =
      verify(collective_of(collective), world.view, world.hosts, root, world.in_place);
  return py::make_tuple(v.right() ? py::object(py::none()) : py::object(py::str(v.defect)),
                        name(v.order));
}

auto predict_world(const LoweredWorldView& world, double bytes, double buffer_bytes,
                   const std::array<double, 6>& figures) {
  CostModel model{figures[0], figures[1], figures[2], figures[3]};
  model.network = figures[4];
  model.latency = figures[5];
  const Prediction done = predict(world, {bytes, buffer_bytes}, model);
  std::vector<std::tuple<int, int, double, double>> spans;
  spans.reserve(done.spans.size());
  for (const TimeSpan& s : done.spans) spans.emplace_back(s.rank, s.step, s.start, s.end);
  return std::pair(done.seconds, std::move(spans));
}

}  // namespace

void bind_world_view(py::module_& m) {
  py::class_<LoweredWorldView>(m, "WorldView")
      .def(py::init(&world_view_of), py::arg("algorithm"), py::arg("hosts"), py::arg("root"),
           py::arg("in_place"), py::arg("choice"))
      .def_property_readonly("plan", [](const LoweredWorldView& w) { return w.view.plan; })
      .def_property_readonly("chunks", [](const LoweredWorldView& w) { return w.view.chunks; })
      .def("verify", &verify_world, py::arg("collective"), py::arg("root"))
      .def(
          "runs",
          [](const LoweredWorldView& w, double bytes, double buffer_bytes) {
            return runs(w.view, {bytes, buffer_bytes});
          },
          py::arg("bytes"), py::arg("buffer_bytes"))
      .def("predict", &predict_world, py::arg("bytes"), py::arg("buffer_bytes"), py::arg("model"));
  m.def(
      "find_fold_between_hosts",
      [](const Plan& plan, const HostSizes& sizes) {
        check(plan, false);
        const Hosts hosts = Hosts::of_sizes(sizes);
        require(hosts.world() == plan.world, "the hosts have ", hosts.world(),
                " ranks, and the plan has ", plan.world);
        return find_fold_between_hosts(plan, hosts);
      },
      py::arg("plan"), py::arg("hosts"));
  m.def("select_over_hosts", &select_over_hosts, py::arg("collective"), py::arg("hosts"),
        py::arg("nbytes"), py::arg("algorithm"));
}

}  // namespace pycollect
