// From what torch's collectives are given to what the executor runs: tensors in, a call out. Every
// refusal is here; nothing has moved when one of these throws.
#pragma once
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "binder.h"

namespace pycollect::dist {

// Any number of tensors, of any dtypes: one run of the executor for each dtype.
void all_reduce(Call& call, Seat seat, const Tensors& tensors, const c10d::ReduceOp& op);
void reduce(Call& call, Seat seat, const Tensors& tensors, const c10d::ReduceOp& op, int64_t root);
void broadcast(Call& call, Seat seat, const Tensors& tensors, int64_t root);

// Lists are [tensor][rank], with parts of any sizes; `_single` joins the ranks' parts, all alike,
// in one tensor.
using TensorLists = std::vector<Tensors>;
void all_gather(Call& call, Seat seat, const TensorLists& outputs, const Tensors& inputs);
void all_gather_single(Call& call, Seat seat, const Tensors& outputs, const Tensors& inputs);
void reduce_scatter(Call& call, Seat seat, const Tensors& outputs, const TensorLists& inputs,
                    const c10d::ReduceOp& op);
void reduce_scatter_single(Call& call, Seat seat, const Tensors& outputs, const Tensors& inputs,
                           const c10d::ReduceOp& op);

// The list is empty on all ranks but the root.
void gather(Call& call, Seat seat, const TensorLists& outputs, const Tensors& inputs, int64_t root);
void gather_single(Call& call, Seat seat, const at::Tensor& output, const at::Tensor& input,
                   int64_t root);
void scatter(Call& call, Seat seat, const Tensors& outputs, const TensorLists& inputs,
             int64_t root);
void all_to_all(Call& call, Seat seat, const Tensors& outputs, const Tensors& inputs);
// Sizes along the first dimension; none: equal parts.
struct Splits {
  const std::vector<int64_t>&output, &input;
};
void all_to_all_single(Call& call, Seat seat, const at::Tensor& output, const at::Tensor& input,
                       const Splits& splits);

}  // namespace pycollect::dist
