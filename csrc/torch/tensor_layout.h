// Memory layouts of tensors: as rectangles, for collectives that work in place on any strides, and
// as an order of dimensions, for collectives that split and concatenate along one of them.
#pragma once
#include <c10/util/SmallVector.h>

#include <span>
#include <vector>

#include "../plan/compiled_plan.h"
#include "arguments.h"

namespace pycollect {

// The first byte of a tensor's memory. It comes from const_data_ptr(), because mutable_data_ptr()
// copies a lazy clone, which a call that only reads must not do. extent() has called
// mutable_data_ptr() before for every tensor that the call writes.
inline std::byte* bytes_of(const at::Tensor& t) {
  return static_cast<std::byte*>(const_cast<void*>(t.const_data_ptr()));
}

// `rows` rows of `count` contiguous elements, `pitch` elements apart, the first at `offset`.
struct Rectangle {
  int64_t offset = 0, rows = 1, pitch = 0, count = 0;

  BufferMemory of(const at::Tensor& tensor) const {  // its memory in a tensor
    const auto item = static_cast<int64_t>(tensor.element_size());
    return {bytes_of(tensor) + offset * item, pitch * item};
  }
};

using Rectangles = c10::SmallVector<Rectangle, 1>;
// Returns rectangles that cover every element once. Their order depends only on sizes and strides,
// so tensors with the same sizes and strides correspond element by element. A dense tensor (also
// channels_last) is one row.
Rectangles rectangles(const at::Tensor& tensor);

// Whether the tensors are dense with equal strides. The strides of dimensions of one element
// address nothing, and tracers do not know them.
bool have_one_dense_layout(const Tensors& tensors);

// Returns an order of dimensions, outermost first, in which all tensors are contiguous; empty if
// there is none.
std::vector<int64_t> common_order(std::span<const at::Tensor> tensors);

// Returns a new tensor of these sizes that is contiguous in that order.
at::Tensor empty_in_order(at::IntArrayRef sizes, std::span<const int64_t> order,
                          const at::TensorOptions& options);

// Products of the sizes outside a dimension (`rows`) and inside it (`inner`), for a tensor that is
// contiguous in `order`.
struct OuterInner {
  int64_t rows = 1, inner = 1;
  OuterInner(const at::Tensor& tensor, std::span<const int64_t> order, int64_t dim);
};

}  // namespace pycollect
