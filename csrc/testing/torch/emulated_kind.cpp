// Torch's functions on tensors of the emulated kind of device: those that make, view and copy them.
#include <ATen/ops/as_strided_native.h>
#include <torch/library.h>

#include "../../torch/gpus.h"
#include "emulated_torch.h"

namespace pycollect {
namespace {

EmulatedTorch& emulated() {
  return dynamic_cast<EmulatedTorch&>(gpu_calls(EmulatedTorch::kLists).runtime());
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat>) {
  return emulated().empty(sizes, type.value_or(at::kFloat), *device);
}

// Only of dense tensors.
at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> type, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  return at::native::as_strided_tensorimpl(
      emulated().empty(sizes, type.value_or(at::kFloat), *device), sizes, strides, std::nullopt);
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool) {
  emulated().copy(to, from);
  return to;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("copy_", &copy_);
}

}  // namespace

}  // namespace pycollect
