#include "bind_machine.h"

#include "../cpu/fold.h"
#include "gpus.h"

namespace pycollect {
namespace {

void say(const char* level, const std::string& line) {
  const py::gil_scoped_acquire hold;
  py::module_::import("pycollect.log").attr(level)(line);
}

// The functions outlive the module: they are asked for lines until the interpreter ends.
void set_listener() {
  listen([](const std::string& line) { say("info", line); });
}

py::tuple peers(int from, int to) {
  PeerReport found;
  {
    const py::gil_scoped_release free;
    found = peer_access(from, to);
  }
  return py::make_tuple(found.asked, found.defect, found.rank);
}

}  // namespace

void bind_machine(py::module_& m) {
  m.def("has_cuda", &has_cuda);
  m.def("stage_all", &stage_all);
  m.def("peer_access", &peers);
  m.def("listen", &set_listener);
  warn_through([](const std::string& line) { say("warning", line); });
  m.def("instruction_set", &cpu::instruction_set);
}

}  // namespace pycollect
