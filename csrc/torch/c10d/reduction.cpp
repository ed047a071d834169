// See reduction.h.
#include "reduction.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/mul.h>

#include <algorithm>

#include "../../plan/error.h"

namespace pycollect::dist {
namespace {

// Returns the factor. If it is on a device, waits for that, so the call's tensors must have been
// checked before.
at::Scalar factor_of(const c10d::_SupplementBase& supplement) {
  // torch.distributed._make_nccl_premul_sum makes this type, the only supplement of PREMUL_SUM.
  const auto& given = static_cast<const c10d::NCCLPreMulSumSupplement&>(supplement);
  return given.tensor_factor.defined() ? given.tensor_factor.item()
                                       : at::Scalar(given.double_factor);
}

Binder::Fill product(const at::Tensor& t, const at::Scalar& factor) {
  return [t, factor](const at::Tensor& into) {
    const at::AutoDispatchBelowADInplaceOrView as_memory;                // allows inference tensors
    if (at::isFloatingType(t.scalar_type()) && t.element_size() == 1) {  // no mul in torch
      into.copy_(at::mul(t.to(at::kFloat), factor));
      return;
    }
    at::Tensor out = into;
    at::mul_out(out, t, at::native::wrapped_scalar_tensor(factor));
  };
}

}  // namespace

Reduction::Reduction(const c10d::ReduceOp& op, const char* call) {
  const auto given = static_cast<c10d::ReduceOp::RedOpType>(op);
  if (given == c10d::ReduceOp::PREMUL_SUM) {
    require(op.supplement_ != nullptr, call,
            ": PREMUL_SUM has no factor; make the op with "
            "torch.distributed._make_nccl_premul_sum(factor)");
    supplement_ = op.supplement_;
    return;
  }
  const auto* const found = std::ranges::find(kTorchOps, given);
  require_type(found != kTorchOps.end(), call,
               ": the op is not supported; pass one of torch.distributed.ReduceOp");
  op_ = static_cast<ReduceOp>(found - kTorchOps.begin());
}

DType Reduction::dtype(const at::Tensor& t, const ArgumentName& label) const {
  const DType dtype = dtype_of(t, label);
  check_op(dtype, op_, label.call);
  return dtype;
}

Binder::Fill Reduction::scaled(const at::Tensor& t, const ArgumentName& label) const {
  const at::ScalarType type = t.scalar_type();
  require_type(type != at::kBool, label.call, ": PREMUL_SUM is not defined for bool; pass numbers");
  const at::Scalar given = factor_of(*supplement_);
  if (at::isFloatingType(type) || at::isComplexType(type)) {
    require_type(at::isComplexType(type) || !given.isComplex(), label.call, ": PREMUL_SUM of ",
                 label, ", ", dtype_name(t), ", needs a real factor; the factor is complex");
    return product(t, given);
  }
  const double factor = given.toDouble();
  require_type(factor == static_cast<double>(static_cast<int64_t>(factor)), label.call,
               ": PREMUL_SUM of ", label, ", ", dtype_name(t),
               ", needs an integer factor; the factor is ", factor);
  return product(t, at::Scalar(static_cast<int64_t>(factor)));
}

}  // namespace pycollect::dist
