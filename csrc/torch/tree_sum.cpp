// The sum in tree order of tensors of one device: a reduction of as many ranks, into a new tensor.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "../plan/error.h"
#include "collectives.h"
#include "tensor_layout.h"

namespace pycollect {
namespace {

DType check(const Tensors& tensors) {
  require(!tensors.empty(), "tree_sum: tensors is empty; pass at least one tensor");
  const ArgumentName first{"tree_sum", "tensors", 0};
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& t = tensors[i];
    const ArgumentName label{"tree_sum", "tensors", static_cast<int>(i)};
    check_tensor(t, AccessMode::read, label);
    check_alike(t, label, tensors[0], first, Alike::shape);
    require(t.device() == tensors[0].device(), "tree_sum: ", label, " is on ", t.device(),
            " and tensors[0] on ", tensors[0].device(), "; all must be on one device");
  }
  const DType dtype = dtype_of(tensors[0], first);
  check_op(dtype, ReduceOp::sum, "tree_sum");
  return dtype;
}

// Replaces the tensors by contiguous ones, into which the call copies them, unless all are dense
// with the same strides.
void to_one_layout(Tensors& tensors, ListCall& call) {
  if (are_dense_alike(tensors)) return;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    at::Tensor& t = tensors[i];
    if (t.is_contiguous()) continue;
    const at::Tensor dense = at::empty(t.sizes(), t.options());
    check_tensor(dense, AccessMode::write, {"tree_sum", "a copy of an input"});
    call.add_layout_copy(dense, t, static_cast<Rank>(i));
    t = dense;
  }
}

}  // namespace

ListCall tree_sum(ListArgs args) {
  Tensors& tensors = args.inputs.flat;
  const DType dtype = check(tensors);
  const at::ScalarType own = tensors[0].scalar_type(), wanted = args.dtype.value_or(own);
  require(wanted == own || (wanted == at::kFloat && accumulator(dtype) == DType::f32),
          "tree_sum: dtype is ", c10::getDtypeNames(wanted).first, "; the sum of ", name(dtype),
          " tensors may be ", name(dtype), accumulates_in_itself(dtype) ? "" : " or float32");
  ListCall call{.name = "tree_sum",
                .devices = args.inputs.devices(),
                .held = tensors,
                .bytes = tensors[0].nbytes()};
  const auto world = static_cast<int>(tensors.size());
  const SelectionKey key{.collective = Collective::reduce,
                         .world = world,
                         .bytes = call.bytes,
                         .dtype = dtype,
                         .in_place = false,
                         .order = FoldOrder::tree};
  to_one_layout(tensors, call);
  const at::Tensor result = at::empty_like(tensors[0].detach(), tensors[0].options().dtype(wanted));
  check_tensor(result, AccessMode::write, {"tree_sum", "the result"});
  call.results = {result};
  if (world == 1) call.layout_copies.push_back({result, tensors[0].detach(), 0});
  const auto count = static_cast<std::size_t>(result.numel());
  if (world == 1 || count == 0) return call;
  BoundPlan plan = call.make_plan(key, {}, 0, ReduceOp::sum);
  plan.options.widens = wanted != own;
  std::vector<BufferMemory> memory(tensors.size() * kBuffers);
  for (std::size_t i = 0; i < tensors.size(); ++i) memory[i * kBuffers] = {bytes_of(tensors[i])};
  memory[1] = {bytes_of(result)};
  call.bind(plan, PlanOffsets(plan.compiled.plan, {&count, 1}), std::move(memory));
  call.plans.push_back(std::move(plan));
  return call;
}

}  // namespace pycollect
