// Binds functions that describe this machine (CUDA, peer access, instruction set), and the log.
#include <chrono>

#include "../cpu/fold.h"
#include "../group/placement.h"
#include "bindings.h"
#include "collectives.h"
#include "from_python.h"
#include "gpus.h"
#include "log.h"

namespace pycollect {
namespace {

void write_log(const char* level, const std::string& line) {
  const py::gil_scoped_acquire gil;
  py::module_::import("pycollect.log").attr(level)(line);
}

void enable_log() {
  log_sink = [](const std::string& line) { write_log("info", line); };
}

py::tuple peer_access(int from, int to) {
  PeerReport report;
  {
    const py::gil_scoped_release no_gil;
    report = report_peer_access(from, to);
  }
  return py::make_tuple(report.reported, report.defect, report.performance_rank);
}

// Returns the seconds of each of `iterations` runs of one ListCall, an all_reduce: without the
// time of Python and of the argument checks.
std::vector<double> time_all_reduce(const py::object& tensors, const py::object& op,
                                    const py::object& algorithm, int iterations) {
  constexpr const char* kCall = "time_all_reduce";
  Producers producers;  // none: the tensors are torch's
  Tensors list = tensors_from(tensors, write_access, kCall, producers);
  const int world = static_cast<int>(list.size());
  const ListCall call = pycollect::in_place({.collective = Collective::all_reduce,
                                             .call = kCall,
                                             .inputs = {std::move(list), world},
                                             .op = op_from(op, kCall),
                                             .algorithm = algorithm_from(algorithm, kCall)});
  const py::gil_scoped_release no_gil;
  std::vector<double> seconds;
  for (int i = 0; i < iterations; ++i) {
    const auto start = std::chrono::steady_clock::now();
    call.run();
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return seconds;
}

// Returns the numbers of the cores of each NUMA node.
std::map<int, std::vector<int>> numa_nodes(const std::string& folder) {
  std::map<int, std::vector<int>> nodes;
  for (const auto& [number, cores] : ipc::numa_nodes(folder)) {
    std::vector<int>& node = nodes[number];
    for (std::size_t core = 0; core < cores.size(); ++core)
      if (cores[core]) node.push_back(static_cast<int>(core));
  }
  return nodes;
}

}  // namespace

void bind_machine(py::module_& m) {
  m.def("has_cuda", &has_cuda);
  m.def("peer_access", &peer_access);
  m.def("enable_log", &enable_log);
  warning_sink = [](const std::string& line) { write_log("warning", line); };
  m.def("instruction_set", &cpu::instruction_set);
  m.def("numa_nodes", &numa_nodes, py::arg("folder") = ipc::kNodeFolder);
  m.def("time_all_reduce", &time_all_reduce, py::arg("tensors"), py::arg("op"),
        py::arg("algorithm"), py::arg("iterations"));
}

}  // namespace pycollect
