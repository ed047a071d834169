// Binds host views and the transfers of rank programs. Hosts are given by the host of each rank, in
// any order, so that tests also see placements in which the ranks of a host are not consecutive.
#include <string>
#include <tuple>
#include <vector>

#include "../../plan/error.h"
#include "../../rank_executor/rank_program.h"
#include "bind.h"

namespace pycollect {
namespace {

using TransferTuple = std::tuple<std::string, int, int, bool>;  // direction, peer, number, early

TransferTuple tuple_of(const HostTransfer& t) {
  const bool sends = t.direction == HostTransfer::Direction::send;
  return {sends ? "send" : "receive", t.peer, t.number, t.early};
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
    const ipc::RankProgram& program = ipc::rank_program(
        {&algorithm, hosts.world(), pieces, root, rank, in_place, false, false, &hosts, senders});
    std::vector<TransferTuple> all;
    for (const int i : program.transfers)
      all.push_back(tuple_of(*program.instructions[i].transfer));
    return all;
  }
};

}  // namespace

void bind_host_views(py::module_& m) {
  py::class_<HostsCase>(m, "HostsCase")
      .def(py::init<const Algorithm&, const std::vector<int>&, Rank, int, bool, bool>(),
           py::arg("algorithm"), py::arg("host_of"), py::arg("root"), py::arg("pieces"),
           py::arg("in_place"), py::arg("first_ranks_send"))
      .def("transfers", &HostsCase::transfers, py::arg("rank"));
}

}  // namespace pycollect
