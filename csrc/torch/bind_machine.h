// What the extension knows of the machine that it is on, and where it says things.
#pragma once
#include <torch/csrc/utils/pybind.h>

namespace pycollect {
void bind_machine(py::module_& m);
}
