// What a call may be given: every refusal of a tensor is here, before anything moves, and says what
// was asked, what is allowed and what to do.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "../plan/dtype.h"

namespace pycollect {

using Tensors = std::vector<at::Tensor>;

// Names an argument in a message: `tensors[2]`, or `tensor_lists[2][5]`.
struct Label {
  const char* call;
  const char* list;
  int rank = -1, index = -1;
};
std::ostream& operator<<(std::ostream& out, const Label& label);

std::string dtype_name(const at::Tensor& tensor);              // as Python spells it
DType dtype_of(const at::Tensor& tensor, const Label& label);  // throws TypeError

enum class AccessMode { read, write };

// One tensor by itself: dense or strided memory that is really there and, when it is written, one
// place per element.
void check_memory(const at::Tensor& tensor, AccessMode use, const Label& label);

// And that is served, and not part of a graph.
void check_tensor(const at::Tensor& tensor, AccessMode use, const Label& label);

// The same device kind, dtype, shape and order in memory as the first of them.
enum class Alike { shape_and_layout, shape, all_but_dim };
void check_alike(const at::Tensor& tensor, const Label& label, const at::Tensor& first,
                 const Label& first_label, Alike alike, int64_t dim = 0);

// Nothing that is written shares memory with anything else of the call.
struct Extent {
  const std::byte *begin, *end;
  bool written;
  Label label;
};
Extent extent(const at::Tensor& tensor, AccessMode use, const Label& label);
void check_disjoint(std::vector<Extent>& extents);  // reorders them

ReduceOp op_named(std::string_view word, const char* call);
void check_op(DType dtype, ReduceOp op, const char* call);  // throws TypeError
int64_t check_dim(const at::Tensor& tensor, int64_t dim,
                  const Label& label);  // wrapped to [0, dims)
void check_rank(int64_t rank, int world, const char* call, const char* argument);

}  // namespace pycollect
