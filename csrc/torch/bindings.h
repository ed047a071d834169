// What the module pycollect._C has for Python, one function for each file bind_*.cpp. This header
// does not include torch.
#pragma once
#include <pybind11/pybind11.h>

#include <string>

#include "../plan/program.h"
#include "../plan/registry.h"

namespace pycollect {

void bind_collectives(pybind11::module_& m);  // on lists of tensors
void bind_distributed(pybind11::module_& m);  // the backend of torch.distributed and its options
// The scheduler and the store of ranks that are threads.
void bind_threads(pybind11::module_& m);
// Functions that describe this machine (CUDA, peer access, instruction set), and the log.
void bind_machine(pybind11::module_& m);
// Plans, programs, the registry of algorithms and the analysis of plans (csrc/analysis).
void bind_plan(pybind11::module_& m);

// Throws TypeError for an object that is not a string, naming `call`, and ValueError for an unknown
// name.
Collective collective_from(pybind11::handle name, const char* call);
LevelPolicy level_policy_of(const std::string& name);  // "any" or "one_task"

}  // namespace pycollect
