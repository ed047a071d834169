// Releases the GIL if this thread holds it. A thread must release it before it waits for another
// thread, which may need the GIL to drop the last reference to a tensor that Python references.
#pragma once
#include <pybind11/pybind11.h>

#include <optional>

namespace pycollect::dist {

class GilRelease {
 public:
  GilRelease() {
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) released_.emplace();
  }

 private:
  std::optional<pybind11::gil_scoped_release> released_;
};

}  // namespace pycollect::dist
