// Maps a torch reduction to a library operation and, for PREMUL_SUM, a factor applied beforehand.
#pragma once
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "binder.h"

namespace pycollect::dist {

// torch's operations, in the order of ReduceOp.
inline constexpr std::array kTorchOps{
    c10d::ReduceOp::SUM, c10d::ReduceOp::AVG,  c10d::ReduceOp::PRODUCT, c10d::ReduceOp::MIN,
    c10d::ReduceOp::MAX, c10d::ReduceOp::BAND, c10d::ReduceOp::BOR,     c10d::ReduceOp::BXOR};

class Reduction {
 public:
  Reduction(const c10d::ReduceOp& op, const char* call);

  ReduceOp op() const { return op_; }
  bool scales() const { return supplement_ != nullptr; }  // true for PREMUL_SUM
  // Returns a function that multiplies by the factor, in the tensor's own dtype, when it is called.
  Binder::Fill scaled(const at::Tensor& tensor, const ArgumentName& label) const;
  // Returns the tensor's dtype. Throws if the reduction is not defined for it.
  DType dtype(const at::Tensor& tensor, const ArgumentName& label) const;

 private:
  ReduceOp op_ = ReduceOp::sum;
  c10::intrusive_ptr<c10d::_SupplementBase> supplement_ = {};  // holds the factor of PREMUL_SUM
};

}  // namespace pycollect::dist
