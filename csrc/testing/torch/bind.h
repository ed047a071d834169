// What the module of doubles and probes binds, file by file.
#pragma once
#include <torch/csrc/utils/pybind.h>

namespace pycollect {

void bind_streams(py::module_& m);       // the executor for devices, on devices that are not there
void bind_probe(py::module_& m);         // copies by the host, and descriptors
void bind_cuda_probe(py::module_& m);    // the device's kernels on host memory, thread after thread
void bind_fake_devices(py::module_& m);  // devices that are not there, for the backend

}  // namespace pycollect
