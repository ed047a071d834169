// Plans over several hosts for Python: made from an algorithm and the number of ranks on each host.
#include <pybind11/stl.h>

#include <array>
#include <cmath>
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

// Of these, no rank of a group knows the sizes of all blocks.
bool is_irregular(Collective c) {
  return c == Collective::gather || c == Collective::scatter || c == Collective::all_to_all;
}

// Returns what the executor of processes selects for a call. `named`: as for `choose`.
ChoiceTuple select_over_hosts(py::handle collective, const HostSizes& sizes, std::size_t nbytes,
                              const std::string& named) {
  const Hosts hosts = Hosts::of_sizes(sizes);
  const Collective called = collective_from(collective, "plan");
  SelectionKey key{called, hosts.world(), is_irregular(called) ? 0 : nbytes, DType::f32, false};
  key.topology = Topology::hosts;
  key.hosts = &hosts;
  key.run_bytes = kHostsBufferBytes;
  const Choice choice = choose(key, named);
  return {choice.algorithm->name, choice.pieces, choice.senders == HostSenders::first};
}

// Most slices of a plan for more than kUnlimitedRanks ranks: 2 to 14 GB with its view.
constexpr double kMostSlices = 1 << 24;
constexpr int kUnlimitedRanks = 1024;

// Returns the number of slices of the plan for the first hosts. A destination counts as several: it
// may become a step of its own.
double size_of(const Algorithm& algorithm, const HostSizes& sizes, int hosts, int pieces) {
  const Hosts first = Hosts::of_sizes({sizes.begin(), sizes.begin() + hosts});
  const Plan plan = algorithm({first.world(), 0, pieces, &first});
  std::size_t size = 0;
  for (const Step& step : plan.steps) size += 4 * step.dsts.size() + step.srcs.size();
  return static_cast<double>(size);
}

// Plans of a few hosts show how fast those of an algorithm grow, before too large a one is made.
void check_size(const Algorithm& algorithm, const HostSizes& sizes, int world, int pieces) {
  constexpr int kSome = 4, kMore = 8;
  if (world <= kUnlimitedRanks || sizes.size() <= kMore) return;
  const double some = size_of(algorithm, sizes, kSome, pieces);
  const double more = size_of(algorithm, sizes, kMore, pieces);
  const double doublings = std::log2(static_cast<double>(sizes.size()) / kMore);
  const double size = more * std::pow(more / some, doublings);
  require(size <= kMostSlices, name(algorithm.collective), " by '", algorithm.name, "' has about ",
          static_cast<int64_t>(size), " slices and copies for ", world, " ranks, more than ",
          static_cast<int64_t>(kMostSlices), "; pass fewer ranks or pieces, or another algorithm");
}

LoweredWorldView world_view_of(const Algorithm& algorithm, const HostSizes& sizes, Rank root,
                               bool in_place, const std::pair<int, bool>& choice) {
  const Hosts hosts = Hosts::of_sizes(sizes);
  const auto [pieces, first] = choice;
  check_size(algorithm, sizes, hosts.world(), pieces);
  return LoweredWorldView(algorithm({hosts.world(), root, pieces, &hosts}), in_place,
                          is_irregular(algorithm.collective), hosts,
                          first ? HostSenders::first : HostSenders::all);
}

py::object verify_world(const LoweredWorldView& world, const std::string& collective, Rank root) {
  const Verification v =
      verify(collective_of(collective), world.view, world.hosts, root, world.in_place);
  return py::make_tuple(v.right() ? py::object(py::none()) : py::object(py::str(v.defect)),
                        name(v.order));
}

Prediction predicted(const LoweredWorldView& world, double bytes, double buffer_bytes,
                     const std::array<double, 6>& figures) {
  CostModel model{figures[0], figures[1], figures[2], figures[3]};
  model.network = figures[4];
  model.latency = figures[5];
  return predict(world, {bytes, buffer_bytes}, model);
}

double predict_world(const LoweredWorldView& world, double bytes, double buffer_bytes,
                     const std::array<double, 6>& figures) {
  return predicted(world, bytes, buffer_bytes, figures).seconds;
}

auto timeline_of_world(const LoweredWorldView& world, double bytes, double buffer_bytes,
                       const std::array<double, 6>& figures) {
  const Prediction done = predicted(world, bytes, buffer_bytes, figures);
  std::vector<std::tuple<int, int, double, double>> spans;
  spans.reserve(done.spans.size());
  for (const TimeSpan& s : done.spans) spans.emplace_back(s.rank, s.step, s.start, s.end);
  return std::pair(done.seconds, std::move(spans));
}

}  // namespace

void bind_world_view(py::module_& m) {
  m.attr("HOSTS_BUFFER_BYTES") = kHostsBufferBytes;
  py::class_<LoweredWorldView>(m, "WorldView")
      .def(py::init(&world_view_of), py::arg("algorithm"), py::arg("hosts"), py::arg("root"),
           py::arg("in_place"), py::arg("choice"))
      .def_property_readonly(
          "plan", [](const LoweredWorldView& w) -> const Plan& { return w.view.plan; },
          py::return_value_policy::reference_internal)
      .def_property_readonly("chunks", [](const LoweredWorldView& w) { return w.view.chunks; })
      .def("verify", &verify_world, py::arg("collective"), py::arg("root"))
      .def(
          "runs",
          [](const LoweredWorldView& w, double bytes, double buffer_bytes) {
            return runs(w.view, {bytes, buffer_bytes});
          },
          py::arg("bytes"), py::arg("buffer_bytes"))
      .def("predict", &predict_world, py::arg("bytes"), py::arg("buffer_bytes"), py::arg("model"))
      .def("timeline", &timeline_of_world, py::arg("bytes"), py::arg("buffer_bytes"),
           py::arg("model"));
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
