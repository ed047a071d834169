// Python objects to what the collectives take. Tensors are taken as they are; anything else that
// speaks DLPack goes through pycollect.interop, which is slower and knows about read-only arrays.
#pragma once
#include <c10/util/FunctionRef.h>
#include <torch/csrc/utils/pybind.h>

#include "collectives.h"

namespace pycollect {

using UseOf = c10::function_ref<AccessMode(int rank)>;
Tensors tensors_from(py::handle list, UseOf use, const char* call, const char* name = "tensors");
at::Tensor tensor_from(py::handle item, AccessMode use, const Label& label);
TensorGrid grid_from(py::handle lists, UseOf use, const char* call);

// What a caller gives for a number, a switch or a name is taken as a handle and looked at here, so
// that a wrong type is a sentence that names the argument, and not pybind's list of signatures.
//
// Whatever has __index__ (NumPy's ints, a tensor of one), but no bool.
int64_t int_from(py::handle number, const char* call, const char* name);
// Whatever has __float__ or __index__, but no bool.
double real_from(py::handle number, const char* call, const char* name);
bool flag_from(py::handle flag, const char* call, const char* name);
std::string_view word_from(py::handle word, const char* call, const char* name, const char* hint);

ReduceOp op_from(py::handle op, const char* call);
std::string_view algorithm_from(py::handle name, const char* call);  // empty for None

inline AccessMode only_read(int) { return AccessMode::read; }
inline AccessMode written(int) { return AccessMode::write; }

// None, or one per rank: a stream of the rank's own device, or None for what host memory has none
// of.
Streams streams_from(py::handle streams, const std::vector<at::Device>& devices, const char* call);

}  // namespace pycollect
