// Lets go of the interpreter's lock, if this thread has it: whoever waits for a thread must, that
// may need the interpreter for a moment, to drop the last hold of a tensor that Python knows.
#pragma once
#include <pybind11/pybind11.h>

#include <optional>

namespace pycollect::dist {

class WithoutInterpreter {
 public:
  WithoutInterpreter() {
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) released_.emplace();
  }

 private:
  std::optional<pybind11::gil_scoped_release> released_;
};

}  // namespace pycollect::dist
