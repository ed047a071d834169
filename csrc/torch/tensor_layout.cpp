#include "tensor_layout.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>

namespace pycollect {
namespace {

struct Dim {
  int64_t size, stride;
};

// Returns the dimensions, outermost first, without those of one element. Adjacent dimensions with a
// common stride are merged.
std::vector<Dim> merged(const at::Tensor& t) {
  std::vector<Dim> dims;
  for (int64_t d = 0; d < t.dim(); ++d)
    if (t.size(d) != 1) dims.push_back({t.size(d), t.stride(d)});
  std::stable_sort(dims.begin(), dims.end(), [](Dim a, Dim b) { return a.stride > b.stride; });
  std::vector<Dim> result;
  for (Dim d : dims) {
    if (!result.empty() && result.back().stride == d.size * d.stride)
      result.back() = {result.back().size * d.size, d.stride};
    else
      result.push_back(d);
  }
  return result;
}

}  // namespace

bool have_one_dense_layout(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& t) {
    const at::Tensor& first = tensors[0];
    if (!t.is_non_overlapping_and_dense() || t.dim() != first.dim()) return false;
    for (int64_t d = 0; d < t.dim(); ++d)
      if (t.size(d) != 1 && t.stride(d) != first.stride(d)) return false;
    return true;
  });
}

Rectangles rectangles(const at::Tensor& t) {
  if (t.numel() == 0) return {};
  if (t.is_non_overlapping_and_dense()) return {Rectangle{.count = t.numel()}};
  std::vector<Dim> dims = merged(t);
  Rectangle first{.count = 1};
  if (!dims.empty() && dims.back().stride == 1) first.count = dims.back().size, dims.pop_back();
  if (!dims.empty()) {  // the longest remaining dimension becomes the rows
    const auto longest =
        std::max_element(dims.begin(), dims.end(), [](Dim a, Dim b) { return a.size < b.size; });
    first.rows = longest->size, first.pitch = longest->stride;
    dims.erase(longest);
  }
  Rectangles all{first};
  for (Dim d : dims) {  // every other dimension repeats the rectangles found so far
    const std::size_t known = all.size();
    for (int64_t i = 1; i < d.size; ++i)
      for (std::size_t k = 0; k < known; ++k) {
        all.push_back(Rectangle(all[k]));  // a copy: the vector may grow
        all.back().offset += i * d.stride;
      }
  }
  return all;
}

std::vector<int64_t> common_order(std::span<const at::Tensor> tensors) {
  const at::Tensor& first = *std::max_element(
      tensors.begin(), tensors.end(), [](auto& a, auto& b) { return a.numel() < b.numel(); });
  std::vector<int64_t> order(first.dim());
  std::iota(order.begin(), order.end(), 0);
  auto fits = [&](const at::Tensor& t) {
    return t.numel() == 0 || t.permute(order).is_contiguous();
  };
  auto is_contiguous = [](const at::Tensor& t) { return t.is_contiguous(); };
  if (std::all_of(tensors.begin(), tensors.end(), is_contiguous)) return order;
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return first.stride(a) > first.stride(b); });
  if (!std::all_of(tensors.begin(), tensors.end(), fits)) order.clear();
  return order;
}

at::Tensor empty_in_order(at::IntArrayRef sizes, std::span<const int64_t> order,
                          const at::TensorOptions& options) {
  std::vector<int64_t> ordered(sizes.size()), inverse(sizes.size());
  for (std::size_t i = 0; i < sizes.size(); ++i)
    ordered[i] = sizes[order[i]], inverse[order[i]] = static_cast<int64_t>(i);
  at::Tensor t = at::empty(ordered, options);
  return std::is_sorted(order.begin(), order.end()) ? t : t.permute(inverse);
}

OuterInner::OuterInner(const at::Tensor& t, std::span<const int64_t> order, int64_t dim) {
  bool outside = true;
  for (int64_t d : order) {
    if (d == dim)
      outside = false;
    else
      (outside ? rows : inner) *= t.size(d);
  }
}

}  // namespace pycollect
