// What the module of doubles and probes binds, file by file.
#pragma once
#include <torch/csrc/utils/pybind.h>

namespace pycollect {

// None where there is nothing to say.
inline py::object words(const std::string& said) {
  return said.empty() ? py::object(py::none()) : py::object(py::str(said));
}

void bind_streams(py::module_& m);     // the executor for devices, on devices that are not there
void bind_probe(py::module_& m);       // copies by the host, and descriptors
void bind_cuda_probe(py::module_& m);  // the device's kernels on host memory, thread after thread
void bind_emulator(py::module_& m);    // devices that are not there

}  // namespace pycollect
