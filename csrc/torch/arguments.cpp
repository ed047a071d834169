#include "arguments.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <limits>

#include "../plan/error.h"
#include "gpus.h"

namespace pycollect {
namespace {

// Returns the index of torch's type in kAllDTypeNames, or kNoDType.
constexpr uint8_t kNoDType = 255;
uint8_t find_dtype(at::ScalarType type) {
  static const auto numbers = [] {
    std::array<uint8_t, static_cast<std::size_t>(at::ScalarType::NumOptions)> found;
    found.fill(kNoDType);
    const auto& types = c10::getStringToDtypeMap();
    for (uint8_t i = 0; i < kAllDTypeNames.size(); ++i)
      if (const auto named = types.find(kAllDTypeNames[i]); named != types.end())
        found[static_cast<std::size_t>(named->second)] = i;
    return found;
  }();
  return numbers[static_cast<std::size_t>(type)];
}

Float8Specials::Codes probe(at::ScalarType type) {
  float values[]{1e6F, std::numeric_limits<float>::infinity(),
                 std::numeric_limits<float>::quiet_NaN()};
  const at::Tensor bytes = at::from_blob(values, {3}, at::kFloat).to(type).view(at::kByte);
  const auto* b = bytes.const_data_ptr<uint8_t>();
  return {b[0], b[1], b[2]};
}

template <class Names>
std::string joined(const Names& names) {
  std::string all;
  for (const char* n : names) all += (all.empty() ? "" : ", ") + std::string(n);
  return all;
}

// Compares strides except those of dimensions of one element, which address nothing.
bool same_strides(const at::Tensor& a, const at::Tensor& b) {
  if (a.strides() == b.strides()) return true;
  for (int64_t d = 0; d < a.dim(); ++d)
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  return true;
}

// Returns true if each stride exceeds the extent of all smaller strides, so that no two elements
// share memory. Also false for some valid interleaved layouts, which do not occur by accident.
bool is_non_overlapping(const at::Tensor& t) {
  if (t.is_non_overlapping_and_dense() || t.numel() <= 1) return true;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t d = 0; d < t.dim(); ++d)
    if (t.size(d) > 1) dims.emplace_back(t.stride(d), t.size(d));
  std::sort(dims.begin(), dims.end());
  int64_t inside = 1;
  for (auto [stride, size] : dims) {
    if (stride < inside) return false;
    inside = stride * (size - 1) + inside;
  }
  return true;
}

// Returns the number of elements from the first address of the tensor to just past its last.
int64_t span_of(const at::Tensor& t) {
  if (t.numel() == 0) return 0;
  if (t.is_non_overlapping_and_dense()) return t.numel();
  int64_t last = 1;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return last;
}

// Returns true if the storage covers the whole tensor: storage can be freed or shrunk while a
// tensor still refers to it.
bool has_memory(const at::Tensor& t) {
  const at::TensorImpl& impl = *t.unsafeGetTensorImpl();
  if (impl.is_python_dispatch() || t.is_meta() || t._is_zerotensor() || !t.has_storage())
    return false;
  if (t.numel() == 0) return true;
  const auto end = static_cast<std::size_t>(t.storage_offset() + span_of(t)) * t.element_size();
  return end <= t.storage().nbytes() && t.const_data_ptr() != nullptr;
}

// CUDA aligns components of complex numbers.
bool is_aligned(const at::Tensor& t) {
  const std::size_t unit = t.element_size() / (t.is_complex() ? 2 : 1);
  return reinterpret_cast<std::uintptr_t>(t.const_data_ptr()) % unit == 0;
}

// Returns true if the tensor has a forward-mode tangent, which torch.no_grad does not disable.
bool has_tangent(const at::Tensor& t) {
  return t.unsafeGetTensorImpl()->autograd_meta() != nullptr && t._fw_grad(0).defined();
}

[[noreturn]] void refuse_dtype(const at::Tensor& tensor, const ArgumentName& label,
                               std::span<const char* const> allowed) {
  throw TypeError(
      text(label.call, ": ", label, " is ", dtype_name(tensor), "; allowed are ", joined(allowed)));
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const ArgumentName& label) {
  out << label.list;
  if (label.rank >= 0) out << '[' << label.rank << ']';
  if (label.index >= 0) out << '[' << label.index << ']';
  return out;
}

std::string dtype_name(const at::Tensor& tensor) {
  return std::string(c10::getDtypeNames(tensor.scalar_type()).first);
}

DType dtype_of(const at::Tensor& tensor, const ArgumentName& label) {
  const uint8_t number = find_dtype(tensor.scalar_type());
  if (number >= DTypes::size) [[unlikely]]
    refuse_dtype(tensor, label, kDTypeNames);
  return DType{number};
}

uint8_t dtype_number(const at::Tensor& tensor, const ArgumentName& label) {
  const uint8_t number = find_dtype(tensor.scalar_type());
  if (number == kNoDType) refuse_dtype(tensor, label, kAllDTypeNames);
  return number;
}

DType moved_dtype_of(const at::Tensor& tensor, const ArgumentName& label) {
  const uint8_t number = dtype_number(tensor, label);
  if (number < DTypes::size) return DType{number};
  switch (tensor.element_size()) {
    case 1:
      return DType::u8;
    case 2:
      return DType::i16;
    case 4:
      return DType::i32;
    default:
      return DType::i64;
  }
}

const Float8Specials& float8_specials() {
  static const Float8Specials rounding{probe(at::kFloat8_e4m3fn), probe(at::kFloat8_e5m2)};
  return rounding;
}

void check_memory(const at::Tensor& t, AccessMode access, const ArgumentName& label) {
  require(!t.is_nested() && t.layout() == at::kStrided, label.call, ": ", label,
          " is nested, sparse or of another layout without strides; pass a dense tensor");
  require(
      has_memory(t), label.call, ": ", label,
      " has no memory of its own (a meta, fake, zero or wrapped tensor, or freed storage); pass "
      "a plain tensor");
  require(!t.is_conj() && !t.is_neg(), label.call, ": ", label,
          " is a lazy conjugate or negative view; call .resolve_conj().resolve_neg() first");
  if (!t.is_cpu() && t.numel() != 0 && !is_aligned(t))
    reject(label.call, ": ", label, " begins at ", t.const_data_ptr(),
           ", which is not aligned to its elements of ", t.element_size(),
           " bytes, as GPUs need it; pass .clone()");
  if (access == AccessMode::write && !is_non_overlapping(t))
    reject(label.call, ": ", label, " of shape ", t.sizes(), " and strides ", t.strides(),
           " would be written, but some of its elements share memory (expanded?); pass .clone()");
}

void check_tensor(const at::Tensor& t, AccessMode access, const ArgumentName& label) {
  check_memory(t, access, label);
  require(supports(t.device()), label.call, ": ", label, " is on ", t.device(),
          ", which this build does not support; move it to the CPU with .cpu()");
  require(
      !(t.requires_grad() && at::GradMode::is_enabled()), label.call, ": ", label,
      " requires grad, and autograd does not record this collective; use pycollect.autograd, call "
      "it under torch.no_grad(), or pass .detach()");
  require(!has_tangent(t), label.call, ": ", label,
          " has a forward-mode tangent, and autograd does not record this collective; use "
          "pycollect.autograd, or pass the primal (torch.autograd.forward_ad.unpack_dual)");
}

void check_matches(const at::Tensor& t, const ArgumentName& label, const at::Tensor& first,
                   const ArgumentName& first_label, Match match, int64_t dim) {
  if (t.scalar_type() != first.scalar_type())
    reject(label.call, ": ", label, " is ", dtype_name(t), " and ", first_label, " is ",
           dtype_name(first), "; all ranks must have the same dtype");
  const at::IntArrayRef sizes = t.sizes(), wanted = first.sizes();
  bool same = sizes.size() == wanted.size();
  for (std::size_t d = 0; same && d < sizes.size(); ++d)
    same = sizes[d] == wanted[d] || (match == Match::all_but_dim && static_cast<int64_t>(d) == dim);
  require(same, label.call, ": ", label, " has shape ", sizes, " and ", first_label, " has ",
          wanted,
          match == Match::all_but_dim ? "; shapes may differ along dim only"
                                      : "; all ranks must have the same shape");
  if (match == Match::shape_and_layout && t.numel() != 0 && !same_strides(t, first))
    reject(label.call, ": ", label, " has strides ", t.strides(), " and ", first_label, " has ",
           first.strides(),
           "; all ranks must have the same layout in memory, e.g. through .contiguous()");
}

ArgumentExtent extent(const at::Tensor& t, AccessMode access, const ArgumentName& label) {
  // mutable_data_ptr() gives a lazy clone its own memory before the call writes it.
  const auto* begin = static_cast<const std::byte*>(
      access == AccessMode::write ? t.mutable_data_ptr() : t.const_data_ptr());
  const std::byte* end = begin + span_of(t) * static_cast<int64_t>(t.element_size());
  return {begin, end, access == AccessMode::write, label};
}

void check_disjoint(std::span<ArgumentExtent> all) {
  if (all.size() < 2) return;
  std::sort(all.begin(), all.end(),
            [](const ArgumentExtent& a, const ArgumentExtent& b) { return a.begin < b.begin; });
  // The extents with the highest end so far: among all, and among those that are written.
  const ArgumentExtent *any = nullptr, *written = nullptr;
  for (const ArgumentExtent& e : all) {
    if (e.begin == e.end) continue;
    const ArgumentExtent* other = e.written ? any : written;
    require(other == nullptr || other->end <= e.begin, e.label.call, ": ",
            other ? other->label : e.label, " and ", e.label,
            " may share memory, and one of them would be written; pass .clone() of one of them");
    if (any == nullptr || e.end > any->end) any = &e;
    if (e.written && (written == nullptr || e.end > written->end)) written = &e;
  }
}

ReduceOp op_named(std::string_view name, const char* call) {
  for (std::size_t i = 0; i < kReduceOpNames.size(); ++i)
    if (name == kReduceOpNames[i]) return static_cast<ReduceOp>(i);
  throw std::invalid_argument(
      text(call, ": op is '", name, "'; allowed are ", joined(kReduceOpNames)));
}

FoldOrder order_named(std::string_view name, const char* call) {
  for (std::size_t i = 0; i < kFoldOrderNames.size(); ++i)
    if (name == kFoldOrderNames[i]) return static_cast<FoldOrder>(i);
  throw std::invalid_argument(
      text(call, ": order is '", name, "'; allowed are ", joined(kFoldOrderNames)));
}

void check_op(DType dtype, ReduceOp op, const char* call) {
  if (reduces(dtype, op)) [[likely]]
    return;
  std::vector<const char*> allowed;
  for (const char* n : kReduceOpNames)
    if (reduces(dtype, op_named(n, call))) allowed.push_back(n);
  require_type(false, call, ": op '", name(op), "' is not defined for ", name(dtype),
               "; allowed are ", joined(allowed));
}

int64_t check_dim(const at::Tensor& t, int64_t dim, const ArgumentName& label) {
  require(t.dim() > 0, label.call, ": ", label,
          " has no dimension to split or concatenate along; pass .reshape(1)");
  require(-t.dim() <= dim && dim < t.dim(), label.call, ": dim is ", dim, "; ", label, " of shape ",
          t.sizes(), " allows ", -t.dim(), " to ", t.dim() - 1);
  return dim < 0 ? dim + t.dim() : dim;
}

void check_rank(int64_t rank, int world, const char* call, const char* argument) {
  require(0 <= rank && rank < world, call, ": ", argument, " is ", rank, "; ", world,
          " ranks allow 0 to ", world - 1);
}

}  // namespace pycollect
