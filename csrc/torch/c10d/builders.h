// Builders translate the arguments of torch's collectives into a GroupCall for the executor. All
// argument checks are here: when a builder throws, no data has moved.
#pragma once
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "binder.h"

namespace pycollect::dist {

// torch's operations, in the order of ReduceOp, whose later ones torch does not have.
inline constexpr std::array kTorchOps{
    c10d::ReduceOp::SUM, c10d::ReduceOp::AVG,  c10d::ReduceOp::PRODUCT, c10d::ReduceOp::MIN,
    c10d::ReduceOp::MAX, c10d::ReduceOp::BAND, c10d::ReduceOp::BOR,     c10d::ReduceOp::BXOR};

// Maps a torch reduction to a library operation and, for PREMUL_SUM, a factor applied beforehand.
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

// Reductions and broadcast take tensors of any dtypes; the executor runs once per dtype.
void all_reduce(GroupCall& call, RankAndWorld me, at::TensorList tensors, const c10d::ReduceOp& op);
void reduce(GroupCall& call, RankAndWorld me, at::TensorList tensors, const c10d::ReduceOp& op,
            int64_t root);
void broadcast(GroupCall& call, RankAndWorld me, at::TensorList tensors, int64_t root);

using TensorLists = std::vector<Tensors>;

// The tensors of a collective that moves a block of every rank. On one side of the call a rank has
// its own block, on the other side the blocks of all ranks.
struct BlockTensors {
  const char* own_name;
  at::TensorList own;
  const char* all_name;
  // The blocks of all ranks: of any sizes and indexed [tensor][rank], or of equal size and joined
  // in one tensor each.
  const TensorLists* lists = nullptr;
  at::TensorList joined = {};
};
void all_gather(GroupCall& call, RankAndWorld me, const BlockTensors& tensors);
void reduce_scatter(GroupCall& call, RankAndWorld me, const BlockTensors& tensors,
                    const c10d::ReduceOp& op);
// The blocks of all ranks are those of the root; the others pass no lists.
void gather(GroupCall& call, RankAndWorld me, const BlockTensors& tensors, int64_t root);
void scatter(GroupCall& call, RankAndWorld me, const BlockTensors& tensors, int64_t root);

void all_to_all(GroupCall& call, RankAndWorld me, const Tensors& outputs, const Tensors& inputs);
// Split sizes along the first dimension; empty: equal parts.
struct Splits {
  const std::vector<int64_t>&output, &input;
};
void all_to_all_single(GroupCall& call, RankAndWorld me, const at::Tensor& output,
                       const at::Tensor& input, const Splits& splits);

}  // namespace pycollect::dist
