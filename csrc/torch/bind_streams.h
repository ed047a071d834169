// The executor for devices in Python, on devices that are not there: for tests alone.
#pragma once
#include <pybind11/pybind11.h>

namespace pycollect {

void bind_streams(pybind11::module_& m);  // after bind_plan

}  // namespace pycollect
