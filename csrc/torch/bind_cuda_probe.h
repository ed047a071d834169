// A door for tests: the device's kernels on host memory, thread after thread.
#pragma once
#include <pybind11/pybind11.h>

namespace pycollect {
void bind_cuda_probe(pybind11::module_& m);
}
