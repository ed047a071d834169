// all_reduce, reduce and broadcast, whose buffers are not split by rank, and reduce_scatter.
#include <algorithm>

#include "../../plan/error.h"
#include "builders.h"
#include "reduction.h"
#include "shapes.h"
#include "sparse.h"

namespace pycollect::dist {
namespace {

// This rank's part in a reduction or broadcast. Calls are in place, except that PREMUL_SUM reads
// the products from separate memory.
struct ReductionRole {
  Reduction reduction;
  bool reads, writes;  // whether this rank's tensor is an input, and whether it is written
  Rank root = 0;
};

void bind(const ReductionRole& role, Binder& binder, const at::Tensor& t,
          const ArgumentName& label) {
  const std::size_t request = binder.request(t, label);
  const bool reads = role.reads && !role.reduction.scales();  // else the products are read
  const ipc::BufferSegment span = !role.writes ? binder.read(t, label)
                                  : reads      ? binder.update(t, label)
                                               : binder.write(t, label);
  if (!role.reduction.scales()) return binder.add_input(request, 0, span);
  binder.add_input(request, 0, binder.compute(t, role.reduction.scaled(t, label)));
  if (role.writes) binder.add_output(request, 0, span);
}

void bind_all(GroupCall& call, RankAndWorld me, const Tensors& tensors, const ReductionRole& role) {
  require(!tensors.empty(), call.name, ": no tensors were passed; pass at least one");
  const bool out_of_place = role.reduction.scales();
  Binder binder(call, me,
                {.input_blocks = 1,
                 .output_blocks = out_of_place && role.writes,
                 .op = role.reduction.op(),
                 .root = role.root,
                 .in_place = !out_of_place});
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (call.sparse && tensors[i].is_sparse()) continue;
    const ArgumentName label = label_of(call, "tensors", tensors, i);
    if (call.collective != Collective::broadcast) role.reduction.dtype(tensors[i], label);
    bind(role, binder, tensors[i], label);
  }
  binder.finish();
  call.results = tensors;
}

}  // namespace

// The request of the sparse tensors is the first, so that they are read before a dense tensor with
// the same memory is written.
void all_reduce(GroupCall& call, RankAndWorld me, const Tensors& tensors,
                const c10d::ReduceOp& op) {
  const Reduction reduction(op, call.name);
  if (std::ranges::any_of(tensors, &at::Tensor::is_sparse))
    call.sparse = std::make_shared<SparseSums>(call, me, tensors, reduction);
  bind_all(call, me, tensors, {reduction, true, true});
  if (!call.sparse) return;
  call.requests.insert(call.requests.begin(), call.sparse->counting());
  call.fills.emplace_back([sparse = call.sparse] { sparse->coalesce(); });
}

void reduce(GroupCall& call, RankAndWorld me, const Tensors& tensors, const c10d::ReduceOp& op,
            int64_t root) {
  check_rank(root, me.world, call.name, "dst");
  bind_all(call, me, tensors,
           {Reduction(op, call.name), true, me.rank == root, static_cast<Rank>(root)});
}

void broadcast(GroupCall& call, RankAndWorld me, const Tensors& tensors, int64_t root) {
  check_rank(root, me.world, call.name, "src");
  const bool sends = me.rank == root;
  bind_all(call, me, tensors,
           {Reduction(c10d::ReduceOp::SUM, call.name), sends, !sends, static_cast<Rank>(root)});
}

namespace {

Binder reduce_scatter_binder(GroupCall& call, RankAndWorld me, const Reduction& reduction) {
  return {call,
          me,
          {.input_blocks = static_cast<std::size_t>(me.world),
           .output_blocks = 1,
           .op = reduction.op()}};
}

}  // namespace

// The output of reduce_scatter may be this rank's own part of the input.
void reduce_scatter(GroupCall& call, RankAndWorld me, const Tensors& outputs,
                    const TensorLists& inputs, const c10d::ReduceOp& op) {
  const Reduction reduction(op, call.name);
  Binder binder = reduce_scatter_binder(call, me, reduction);
  check_lists(call, me, outputs, inputs);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const ArgumentName output{call.name, "output"};
    reduction.dtype(outputs[i], output);
    const std::size_t request = binder.request(outputs[i], output);
    const ipc::BufferSegment own = binder.write(outputs[i], output);
    binder.add_output(request, 0, own);
    for (Rank r = 0; r < me.world; ++r) {
      const ArgumentName label{call.name, "input_list", r};
      const at::Tensor& input = inputs[i][r];
      check_dtype(input, label, outputs[i], output);
      if (r == me.rank) check_size(input, label, outputs[i], output);
      const ipc::BufferSegment span = binder.read_aliasing(input, label, own);
      binder.add_input(
          request, r,
          reduction.scales() ? binder.compute(input, reduction.scaled(input, label)) : span);
    }
  }
  binder.finish();
  call.results = outputs;
}

void reduce_scatter_single(GroupCall& call, RankAndWorld me, const Tensors& outputs,
                           const Tensors& inputs, const c10d::ReduceOp& op) {
  const Reduction reduction(op, call.name);
  Binder binder = reduce_scatter_binder(call, me, reduction);
  check_pairs(call, outputs, inputs);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const ArgumentName output = label_of(call, "output", outputs, i);
    const ArgumentName input = label_of(call, "input", inputs, i);
    check_joined(inputs[i], input, outputs[i], output, me.world);
    reduction.dtype(outputs[i], output);
    const std::size_t request = binder.request(outputs[i], output);
    const ipc::BufferSegment own = binder.write(outputs[i], output);
    binder.add_output(request, 0, own);
    const ipc::BufferSegment span =
        binder.read_aliasing(inputs[i], input, own, me.rank * own.count);
    binder.add_whole_input(
        request,
        reduction.scales() ? binder.compute(inputs[i], reduction.scaled(inputs[i], input)) : span);
  }
  binder.finish();
  call.results = outputs;
}

}  // namespace pycollect::dist
