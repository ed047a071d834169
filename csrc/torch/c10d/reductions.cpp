// all_reduce, reduce and broadcast, whose buffers are not split by rank.
#include <algorithm>

#include "../../plan/error.h"
#include "builders.h"
#include "reduction.h"
#include "sparse.h"

namespace pycollect::dist {
namespace {

// This rank's part in a reduction or broadcast. Calls are in place, except that PREMUL_SUM reads
// the products from separate memory.
struct ReductionRole {
  const Reduction& reduction;
  bool reads, writes;  // whether this rank's tensor is an input, and whether it is written
  Rank root = 0;
};

void bind_all(GroupCall& call, RankAndWorld me, at::TensorList tensors, const ReductionRole& role) {
  require(!tensors.empty(), call.name, ": no tensors were passed; pass at least one");
  const bool scales = role.reduction.scales();
  Binder binder(call, me,
                {.input_blocks = 1,
                 .output_blocks = scales && role.writes,
                 .op = role.reduction.op(),
                 .root = role.root,
                 .in_place = !scales});
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& t = tensors[i];
    if (call.sparse && t.is_sparse()) continue;
    const ArgumentName label = label_of(call, "tensors", tensors, i);
    if (call.collective != Collective::broadcast) role.reduction.dtype(t, label);
    const std::size_t request = binder.request(t, label);
    const bool reads = !role.writes || (role.reads && !scales);  // else the products are read
    const ipc::BufferSegment own = binder.bind(t, label, reads, role.writes).memory;
    binder.add(Side::input, request, 0,
               scales ? binder.compute(t, role.reduction.scaled(t, label)) : own);
    if (scales && role.writes) binder.add(Side::output, request, 0, own);
  }
  binder.finish();
  call.results.append(tensors.begin(), tensors.end());
}

}  // namespace

// The request of the sparse tensors is the first, so that they are read before a dense tensor with
// the same memory is written.
void all_reduce(GroupCall& call, RankAndWorld me, at::TensorList tensors,
                const c10d::ReduceOp& op) {
  const Reduction reduction(op, call.name);
  if (std::ranges::any_of(tensors, &at::Tensor::is_sparse))
    call.sparse = std::make_shared<SparseSums>(call, me, tensors, reduction);
  bind_all(call, me, tensors, {reduction, true, true});
  if (!call.sparse) return;
  call.requests.insert(call.requests.begin(), call.sparse->counting());
  call.fills.emplace_back([sparse = call.sparse] { sparse->coalesce(); });
}

void reduce(GroupCall& call, RankAndWorld me, at::TensorList tensors, const c10d::ReduceOp& op,
            int64_t root) {
  check_rank(root, me.world, call.name, "dst");
  bind_all(call, me, tensors,
           {Reduction(op, call.name), true, me.rank == root, static_cast<Rank>(root)});
}

void broadcast(GroupCall& call, RankAndWorld me, at::TensorList tensors, int64_t root) {
  check_rank(root, me.world, call.name, "src");
  const bool sends = me.rank == root;
  bind_all(call, me, tensors,
           {Reduction(c10d::ReduceOp::SUM, call.name), sends, !sends, static_cast<Rank>(root)});
}

}  // namespace pycollect::dist
