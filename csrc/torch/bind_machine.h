// Binds functions that describe this machine (CUDA, peer access, instruction set), and the log.
#pragma once
#include <torch/csrc/utils/pybind.h>

namespace pycollect {
void bind_machine(py::module_& m);
}
