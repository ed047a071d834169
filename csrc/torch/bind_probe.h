// Doors for tests and benchmarks: any plan on any memory, and the executor timed from inside.
#pragma once
#include <torch/csrc/utils/pybind.h>

namespace pycollect {
void bind_probe(py::module_& m);
}
