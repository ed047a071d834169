// Binds the collectives on lists of tensors.
#pragma once
#include <torch/csrc/utils/pybind.h>

namespace pycollect {
void bind_collectives(py::module_& m);
}
