// pycollect._testing: emulated devices, and host copies, for tests only. It is linked from the
// objects of pycollect._C and takes that module's classes, so it imports it first. No wheel
// contains it.
#include "bind.h"

namespace pycollect {

PYBIND11_MODULE(_testing, m) {
  py::module_::import("pycollect._C");
  bind_emulator(m);
  bind_plans(m);
  bind_kernels(m);
}

}  // namespace pycollect
