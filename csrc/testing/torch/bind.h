// Declares the bindings of pycollect._testing, one function per file.
#pragma once
#include <torch/csrc/utils/pybind.h>

namespace pycollect {

// Converts a text to a Python str, and an empty text to None.
inline py::object words(const std::string& line) {
  return line.empty() ? py::object(py::none()) : py::object(py::str(line));
}

void bind_streams(py::module_& m);     // the executor for devices, on emulated devices
void bind_probe(py::module_& m);       // copies by the host, and the fd server
void bind_cuda_probe(py::module_& m);  // the device's kernels on host memory, thread after thread
void bind_emulator(py::module_& m);    // emulated devices

}  // namespace pycollect
