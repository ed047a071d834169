// Checks of a call's arguments, before any data moves. Every error message names the argument and
// says what it is, what is allowed and what to do. The checks throw ValueError unless noted.
#pragma once
#include <ATen/core/Tensor.h>

#include <ostream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "../plan/dtype.h"

namespace pycollect {

using Tensors = std::vector<at::Tensor>;

// Names an argument in an error message: `tensors[2]`, or `tensor_lists[2][5]`.
struct ArgumentName {
  const char* call;
  const char* list;
  int rank = -1, index = -1;
};
std::ostream& operator<<(std::ostream& out, const ArgumentName& label);

std::string dtype_name(const at::Tensor& tensor);  // Python's name, such as float32
DType dtype_of(const at::Tensor& tensor, const ArgumentName& label);  // throws TypeError
// Returns the dtype as which a call that only moves the tensor copies it: the tensor's own, or the
// integer type of as many bytes, such as int16 for uint16. Throws TypeError for quantized tensors.
DType moved_dtype_of(const at::Tensor& tensor, const ArgumentName& label);
// Returns the index of the tensor's dtype in kAllDTypeNames. Throws as moved_dtype_of does.
uint8_t dtype_number(const at::Tensor& tensor, const ArgumentName& label);

// Returns how the installed torch rounds values that 8-bit floats cannot hold: the results of
// converting an overflow, infinity and NaN with it, which is done once per process.
const Float8Specials& float8_specials();

enum class AccessMode { read, write };

// Checks that the tensor is strided and its memory allocated, and, if it is written, that no two of
// its elements share memory.
void check_memory(const at::Tensor& tensor, AccessMode access, const ArgumentName& label);

// Checks the memory, that this build supports the tensor's device, and that autograd does not track
// the tensor.
void check_tensor(const at::Tensor& tensor, AccessMode access, const ArgumentName& label);

// Checks that the tensor has the dtype of the first one and, as `match` requires, the same shape
// and strides, the same shape, or the same size in every dimension but `dim`.
enum class Match { shape_and_layout, shape, all_but_dim };
void check_matches(const at::Tensor& tensor, const ArgumentName& label, const at::Tensor& first,
                   const ArgumentName& first_label, Match match, int64_t dim = 0);

// The addresses from a tensor's first element to its last.
struct ArgumentExtent {
  const std::byte *begin, *end;
  bool written;
  ArgumentName label;
};
ArgumentExtent extent(const at::Tensor& tensor, AccessMode access, const ArgumentName& label);
// Checks that no extent that is written overlaps another one. Sorts the extents.
void check_disjoint(std::span<ArgumentExtent> extents);

ReduceOp op_named(std::string_view name, const char* call);
FoldOrder order_named(std::string_view name, const char* call);
void check_op(DType dtype, ReduceOp op, const char* call);  // throws TypeError
// Returns `dim` wrapped to [0, tensor.dim()).
int64_t check_dim(const at::Tensor& tensor, int64_t dim, const ArgumentName& label);
void check_rank(int64_t rank, int world, const char* call, const char* argument);

}  // namespace pycollect
