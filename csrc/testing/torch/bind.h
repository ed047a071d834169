// Bindings of pycollect._testing, one function per file.
#pragma once
#include <torch/csrc/utils/pybind.h>

namespace pycollect {

// Converts a string to a Python str, or to None if it is empty.
inline py::object words(const std::string& line) {
  return line.empty() ? py::object(py::none()) : py::object(py::str(line));
}

void bind_plans(py::module_& m);     // plans as list calls, schedules
void bind_kernels(py::module_& m);   // the device's kernels on host memory, and host copies
void bind_emulator(py::module_& m);  // the CUDA emulator

}  // namespace pycollect
