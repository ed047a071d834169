// Builders translate the arguments of torch's collectives into a GroupCall for the executor. All
// argument checks are here: when a builder throws, no data has moved.
#pragma once
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "binder.h"

namespace pycollect::dist {

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
