// What Python sees of plans, programs, the registry and the simulator. Includes pybind11 alone, so
// it compiles in seconds and could be a module of its own.
#pragma once
#include <pybind11/pybind11.h>

#include <string>

#include "../plan/program.h"

namespace pycollect {

void bind_plan(pybind11::module_& m);

LevelPolicy pace_of(const std::string& name);  // "any" or "one_task"

}  // namespace pycollect
