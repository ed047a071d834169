// pycollect._testing: doubles and probes, for tests alone. It is linked from the objects of
// pycollect._C, whose classes it takes and which is imported first; no wheel has it.
#include "bind.h"

namespace pycollect {

PYBIND11_MODULE(_testing, m) {
  py::module_::import("pycollect._C");
  bind_emulator(m);
  bind_streams(m);
  bind_probe(m);
  bind_cuda_probe(m);
}

}  // namespace pycollect
