// Converts Python arguments for the collectives. Tensors are used as they are. Other objects that
// support DLPack go through pycollect.interop, which is slower, and refuses to write read-only
// arrays.
#pragma once
#include <c10/util/FunctionRef.h>
#include <torch/csrc/utils/pybind.h>

#include "collectives.h"

namespace pycollect {

using AccessOf = c10::function_ref<AccessMode(int rank)>;
// The streams on which the owners of arrays on a GPU use them; each is added once.
using Producers = std::vector<cuda::Stream>;
Tensors tensors_from(py::handle list, AccessOf access, const char* call, Producers& producers,
                     const char* name = "tensors");
at::Tensor tensor_from(py::handle item, AccessMode access, const ArgumentName& label,
                       Producers& producers);
TensorGrid grid_from(py::handle lists, AccessOf access, const char* call, Producers& producers);

// Numbers, flags and names are passed as handles and checked here, so that the TypeError for a
// wrong type names the argument, instead of listing pybind11's signatures.
//
// Accepts an int or an object with __index__ (a NumPy integer, a tensor of one integer); no bool.
int64_t int_from(py::handle number, const char* call, const char* name);
// Accepts an object with __float__ or __index__; no bool.
double real_from(py::handle number, const char* call, const char* name);
bool flag_from(py::handle flag, const char* call, const char* name);
// Accepts a str. `hint` completes the error message: "pass `hint`".
std::string_view string_from(py::handle string, const char* call, const char* name,
                             const char* hint);

ReduceOp op_from(py::handle op, const char* call);
std::string_view algorithm_from(py::handle name, const char* call);  // empty for None

inline AccessMode write_access(int) { return AccessMode::write; }

// Accepts None, or a list with one item per rank: a stream of the rank's device, or None for its
// current stream. The item of a rank in host memory must be None.
Streams streams_from(py::handle streams, const std::vector<at::Device>& devices, const char* call);

}  // namespace pycollect
