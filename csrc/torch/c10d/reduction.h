// torch's reductions as the contract's: one operation, and what is done to the data before it.
#pragma once
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "binder.h"

namespace pycollect::dist {

class Reduction {
 public:
  Reduction(const c10d::ReduceOp& op, const char* call);

  ReduceOp op() const { return op_; }
  bool scales() const { return supplement_ != nullptr; }  // PREMUL_SUM
  // Makes the product with the factor, in the tensor's own dtype, of what the tensor has by then.
  Binder::Fill scaled(const at::Tensor& tensor, const Label& label) const;
  // Of a tensor that is reduced: its dtype, if the operation is defined for it.
  DType dtype(const at::Tensor& tensor, const Label& label) const;

 private:
  ReduceOp op_ = ReduceOp::sum;
  c10::intrusive_ptr<c10d::_SupplementBase> supplement_ = {};  // where its factor is
};

}  // namespace pycollect::dist
