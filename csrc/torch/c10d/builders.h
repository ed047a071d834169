// Builders translate the arguments of torch's collectives into a GroupCall for the executor. All
// argument checks are here: when a builder throws, no data has moved.
#pragma once
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "binder.h"

namespace pycollect::dist {

// Reductions and broadcast take tensors of any dtypes; the executor runs once per dtype.
void all_reduce(GroupCall& call, RankAndWorld me, const Tensors& tensors, const c10d::ReduceOp& op);
void reduce(GroupCall& call, RankAndWorld me, const Tensors& tensors, const c10d::ReduceOp& op,
            int64_t root);
void broadcast(GroupCall& call, RankAndWorld me, const Tensors& tensors, int64_t root);

// Tensor lists are indexed [tensor][rank], with parts of any sizes. The `_single` variants take the
// ranks' parts, of equal size, joined in one tensor.
using TensorLists = std::vector<Tensors>;
void all_gather(GroupCall& call, RankAndWorld me, const TensorLists& outputs,
                const Tensors& inputs);
void all_gather_single(GroupCall& call, RankAndWorld me, const Tensors& outputs,
                       const Tensors& inputs);
void reduce_scatter(GroupCall& call, RankAndWorld me, const Tensors& outputs,
                    const TensorLists& inputs, const c10d::ReduceOp& op);
void reduce_scatter_single(GroupCall& call, RankAndWorld me, const Tensors& outputs,
                           const Tensors& inputs, const c10d::ReduceOp& op);

// The tensor list of gather and scatter is empty on every rank but the root.
void gather(GroupCall& call, RankAndWorld me, const TensorLists& outputs, const Tensors& inputs,
            int64_t root);
void gather_single(GroupCall& call, RankAndWorld me, const at::Tensor& output,
                   const at::Tensor& input, int64_t root);
void scatter(GroupCall& call, RankAndWorld me, const Tensors& outputs, const TensorLists& inputs,
             int64_t root);
void all_to_all(GroupCall& call, RankAndWorld me, const Tensors& outputs, const Tensors& inputs);
// Split sizes along the first dimension; empty: equal parts.
struct Splits {
  const std::vector<int64_t>&output, &input;
};
void all_to_all_single(GroupCall& call, RankAndWorld me, const at::Tensor& output,
                       const at::Tensor& input, const Splits& splits);

}  // namespace pycollect::dist
