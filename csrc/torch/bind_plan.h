// Binds plans, programs, the registry of algorithms and the analysis of plans (csrc/analysis) to
// Python. This header does not include torch.
#pragma once
#include <pybind11/pybind11.h>

#include <string>

#include "../plan/program.h"
#include "../plan/registry.h"

namespace pycollect {

void bind_plan(pybind11::module_& m);

// Throws TypeError for an object that is not a string, naming `call`, and ValueError for an unknown
// name.
Collective collective_from(pybind11::handle name, const char* call);
LevelPolicy level_policy_of(const std::string& name);  // "any" or "one_task"

}  // namespace pycollect
