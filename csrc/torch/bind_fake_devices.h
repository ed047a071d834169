// Binds devices that are not there, for tests of the backend.
#pragma once
#include <torch/csrc/utils/pybind.h>

namespace pycollect {

void bind_fake_devices(py::module_& m);

}  // namespace pycollect
