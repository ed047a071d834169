#include "bind_machine.h"

#include <chrono>

#include "../cpu/fold.h"
#include "collectives.h"
#include "convert.h"
#include "gpus.h"
#include "log.h"

namespace pycollect {
namespace {

void say(const char* level, const std::string& line) {
  const py::gil_scoped_acquire hold;
  py::module_::import("pycollect.log").attr(level)(line);
}

void enable_log() {
  set_log_sink([](const std::string& line) { say("info", line); });
}

py::tuple peers(int from, int to) {
  PeerReport found;
  {
    const py::gil_scoped_release free;
    found = report_peer_access(from, to);
  }
  return py::make_tuple(found.asked, found.defect, found.rank);
}

// Seconds of each of `iterations` runs of one bound all_reduce, without Python and argument checks.
std::vector<double> time_all_reduce(const py::object& tensors, const py::object& op,
                                    const py::object& algorithm, int iterations) {
  constexpr const char* kCall = "time_all_reduce";
  Tensors list = tensors_from(tensors, written, kCall);
  const int world = static_cast<int>(list.size());
  const PreparedCall job = in_place({.collective = Collective::all_reduce,
                                     .call = kCall,
                                     .op = op_from(op, kCall),
                                     .algorithm = algorithm_from(algorithm, kCall)},
                                    {std::move(list), world});
  const py::gil_scoped_release free;
  std::vector<double> seconds;
  for (int i = 0; i < iterations; ++i) {
    const auto start = std::chrono::steady_clock::now();
    job.run();
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return seconds;
}

}  // namespace

void bind_machine(py::module_& m) {
  m.def("has_cuda", &has_cuda);
  m.def("peer_access", &peers);
  m.def("enable_log", &enable_log);
  set_warning_sink([](const std::string& line) { say("warning", line); });
  m.def("instruction_set", &cpu::instruction_set);
  m.def("time_all_reduce", &time_all_reduce, py::arg("tensors"), py::arg("op"),
        py::arg("algorithm"), py::arg("iterations"));
}

}  // namespace pycollect
