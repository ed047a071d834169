// Binds the scheduler and the store of ranks that are threads to Python.
#pragma once
#include <torch/csrc/utils/pybind.h>

namespace pycollect {

void bind_threads(py::module_& m);

}  // namespace pycollect
