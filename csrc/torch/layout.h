// Where the elements of a tensor lie: as rectangles for what works in place on any strides, and as
// an order of dimensions for what cuts and joins along one of them.
#pragma once
#include <span>
#include <vector>

#include "arguments.h"

namespace pycollect {

// The first byte of a tensor's memory. It comes from const_data_ptr(), because mutable_data_ptr()
// copies a lazy clone, which a call that only reads must not do; extent() has already asked for
// write access to every tensor that the call writes.
inline std::byte* bytes_of(const at::Tensor& t) {
  return static_cast<std::byte*>(const_cast<void*>(t.const_data_ptr()));
}

// `rows` runs of `count` elements, `pitch` elements apart, the first at `offset`.
struct Rectangle {
  int64_t offset = 0, rows = 1, pitch = 0, count = 0;
};

// Covers every element once, in an order that depends on sizes and strides alone: tensors that
// agree in these agree element by element. A dense tensor, channels_last included, is one run.
std::vector<Rectangle> rectangles(const at::Tensor& tensor);

// The order of dimensions, outermost first, in which all tensors are contiguous; empty when there
// is none.
std::vector<int64_t> common_order(std::span<const at::Tensor> tensors);

// A new tensor of these sizes that is contiguous in that order.
at::Tensor empty_in_order(at::IntArrayRef sizes, std::span<const int64_t> order,
                          const at::TensorOptions& options);

// For a tensor that is contiguous in `order`: what lies outside a dimension and what inside.
struct Frame {
  int64_t rows = 1, inner = 1;
  Frame(const at::Tensor& tensor, std::span<const int64_t> order, int64_t dim);
};

}  // namespace pycollect
