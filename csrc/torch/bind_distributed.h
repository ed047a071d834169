// Binds the backend of torch.distributed and its options to Python.
#pragma once
#include <torch/csrc/utils/pybind.h>

namespace pycollect {

void bind_distributed(py::module_& m);

}  // namespace pycollect
