// Binds host views and the transfers of rank programs. Hosts are given by the host of each rank, in
// any order, so that tests also see placements in which the ranks of a host are not consecutive.
#include <string>
#include <tuple>
#include <vector>

#include "../../plan/error.h"
#include "../../plan/passes.h"
#include "../../rank_executor/rank_program.h"
#include "bind.h"

namespace pycollect {
namespace {

using TransferTuple = std::tuple<std::string, int, int, bool>;  // direction, peer, number, early

TransferTuple tuple_of(const HostTransfer& t) {
  const bool sends = t.direction == HostTransfer::Direction::send;
  return {sends ? "send" : "receive", t.peer, t.number, t.early};
}

// Describes in what the views differ; empty if they do not.
std::string difference(const HostView& a, const HostView& b) {
  if (a.plan.world != b.plan.world || a.plan.chunks != b.plan.chunks || a.chunks != b.chunks ||
      a.world_rank != b.world_rank)
    return "ranks or chunks";
  if (a.plan.steps.size() != b.plan.steps.size()) return "number of steps";
  for (std::size_t i = 0; i < a.plan.steps.size(); ++i) {
    const Step &s = a.plan.steps[i], &t = b.plan.steps[i];
    if (s.dsts != t.dsts || s.srcs != t.srcs || s.by != t.by) return text("step ", i);
    const auto &u = a.transfers[i], &v = b.transfers[i];
    if (u.has_value() != v.has_value() || (u && tuple_of(*u) != tuple_of(*v)))
      return text("transfer ", i);
  }
  if (a.chunk_of != b.chunk_of || a.finishes != b.finishes) return "chunks or ends of reductions";
  return a.cells == b.cells && a.partial_cells == b.partial_cells && a.packs == b.packs ? ""
                                                                                        : "cells";
}

// A plan over several hosts as its ranks run it.
struct HostsCase {
  const Algorithm& algorithm;
  const Hosts& hosts;
  Rank root;
  int pieces;
  bool in_place;
  HostSenders senders;

  HostsCase(const Algorithm& a, const std::vector<int>& host_of, Rank root_, int pieces_,
            bool in_place_, bool first_ranks_send)
      : algorithm(a),
        hosts(interned(Hosts(host_of))),
        root(root_),
        pieces(pieces_),
        in_place(in_place_),
        senders(first_ranks_send ? HostSenders::first : HostSenders::all) {}

  // Returns the rank's transfers in the order of its instructions.
  std::vector<TransferTuple> transfers(Rank rank) const {
    require(rank >= 0 && rank < hosts.world(), "there is no rank ", rank);
    const ipc::RankProgram program = ipc::make_rank_program(
        {rank, hosts.world(), &hosts}, {&algorithm, pieces, root, in_place, false, senders});
    std::vector<TransferTuple> all;
    for (const int i : program.transfers)
      all.push_back(tuple_of(*program.instructions[i].transfer));
    return all;
  }

  // Returns the plan of the world, or without what one host does not need.
  Plan staged(int host) const {
    return for_processes(algorithm({hosts.world(), root, pieces, &hosts, host}), in_place, false,
                         false);
  }
  // Describes in what the host's view of its own plan differs from that of the world's plan.
  std::string difference_of_views(int host) const {
    return difference(host_view(staged(host), in_place, &hosts, host, senders),
                      host_view(staged(kAllHosts), in_place, &hosts, host, senders));
  }
  std::size_t slices(int host) const {
    std::size_t all = 0;
    for (const Step& step : staged(host).steps) all += step.dsts.size() + step.srcs.size();
    return all;
  }
};

// Returns the transfers of the rank with any plan.
std::vector<TransferTuple> transfers_of_plan(const Plan& plan, bool in_place,
                                             const std::vector<int>& host_of, Rank rank) {
  const Hosts hosts(host_of);
  require(rank >= 0 && rank < hosts.world() && hosts.world() == plan.world, "no rank ", rank);
  const HostView view = host_view(for_processes(plan, in_place, false, false), in_place, &hosts,
                                  hosts.of(rank), HostSenders::all);
  std::vector<TransferTuple> all;
  for (std::size_t i = 0; i < view.plan.steps.size(); ++i)
    if (view.transfers[i] && view.plan.steps[i].owner() == hosts.index(rank))
      all.push_back(tuple_of(*view.transfers[i]));
  return all;
}

}  // namespace

void bind_host_views(py::module_& m) {
  m.def("transfers_of_plan", &transfers_of_plan, py::arg("plan"), py::arg("in_place"),
        py::arg("host_of"), py::arg("rank"));
  py::class_<HostsCase>(m, "HostsCase")
      .def(py::init<const Algorithm&, const std::vector<int>&, Rank, int, bool, bool>(),
           py::arg("algorithm"), py::arg("host_of"), py::arg("root"), py::arg("pieces"),
           py::arg("in_place"), py::arg("first_ranks_send"))
      .def("transfers", &HostsCase::transfers, py::arg("rank"))
      .def("difference_of_views", &HostsCase::difference_of_views, py::arg("host"))
      .def("slices", &HostsCase::slices, py::arg("host"));
}

}  // namespace pycollect
