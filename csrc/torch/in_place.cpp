// Collectives that overwrite their input tensors.
#include <algorithm>

#include "../plan/error.h"
#include "collectives.h"
#include "tensor_layout.h"

namespace pycollect {
namespace {

bool is_reduction(Collective c) { return c == Collective::all_reduce || c == Collective::reduce; }

// Returns the dtype in which the call runs on the tensor.
DType checked_dtype(const ListArgs& args, const at::Tensor& t, const ArgumentName& label) {
  if (!is_reduction(args.collective)) return moved_dtype_of(t, label);
  const DType dtype = dtype_of(t, label);
  check_op(dtype, args.op, args.call);
  return dtype;
}

// Checks all tensors, and returns their groups.
DtypeGroups check(const ListArgs& args) {
  const TensorGrid& grid = args.inputs;
  DtypeGroups groups;
  c10::SmallVector<ArgumentRange, 8> extents;
  for (std::size_t i = 0; i < grid.width(); ++i)
    for (Rank r = 0; r < grid.world; ++r) {
      const at::Tensor& t = grid.flat[i * grid.world + r];
      const ArgumentName label = grid.label(args.call, i, r);
      const AccessMode access = access_of(args, r);
      check_tensor(t, access, label);
      if (i > 0 && t.device() != grid.flat[r].device())
        reject(args.call, ": ", label, " is on ", t.device(), " and ", grid.label(args.call, 0, r),
               " on ", grid.flat[r].device(), "; all tensors of a rank must be on one device");
      if (r > 0)
        check_alike(t, label, grid.flat[i * grid.world], grid.label(args.call, i, 0),
                    Alike::shape_and_layout);
      else
        add(groups, checked_dtype(args, t, label), i, t.nbytes());
      extents.push_back(extent(t, access, label));
    }
  check_disjoint(extents);
  return groups;
}

// Binds one tensor of every rank: one binding for each of its rectangles, which have rows of equal
// length.
void bind_ranks(BoundPlan& plan, std::span<const at::Tensor> ranks, ListCall& call) {
  const std::size_t item = item_bytes(plan.dtype);
  const auto all = rectangles(ranks[0]);
  if (all.empty()) return;
  const auto count = static_cast<std::size_t>(all[0].count);
  const PlanOffsets offsets(plan.compiled.plan, {&count, 1}, aligned_elements(item));
  for (const Rectangle& rectangle : all) {
    std::vector<BufferMemory> memory(ranks.size() * kBuffers);
    for (std::size_t r = 0; r < ranks.size(); ++r)
      memory[r * kBuffers] = memory[r * kBuffers + 1] = rectangle.of(ranks[r]);
    call.bind(plan, offsets, std::move(memory), static_cast<std::size_t>(rectangle.rows));
  }
}

// Moves the tensors into the call.
void hold(ListArgs args, ListCall& call) {
  TensorGrid& grid = args.inputs;
  if (args.collective == Collective::all_reduce) {
    call.written = std::move(grid.flat);
    return;
  }
  for (std::size_t i = 0; i < grid.flat.size(); ++i) {
    const bool writes = access_of(args, i % grid.world) == AccessMode::write;
    (writes ? call.written : call.held).push_back(std::move(grid.flat[i]));
  }
}

}  // namespace

AccessMode access_of(const ListArgs& args, int64_t rank) {
  const bool writes = args.collective == Collective::all_reduce ||
                      (args.collective == Collective::reduce) == (rank == args.root);
  return writes ? AccessMode::write : AccessMode::read;
}

ListCall in_place(ListArgs args) {
  const TensorGrid& grid = args.inputs;
  require(grid.world > 0, args.call, ": ", grid.list, " is empty; pass one tensor per rank");
  check_rank(args.root, grid.world, args.call, root_name(args.collective));
  const DtypeGroups groups = check(args);
  ListCall call{.name = args.call,
                .streams = args.streams,
                .peer_access = args.peer_access,
                .names_algorithm = !args.algorithm.empty()};
  call.devices = grid.devices();
  for (const DtypeGroup& group : groups) {
    const SelectionKey key{.collective = args.collective,
                           .world = grid.world,
                           .bytes = group.bytes,
                           .dtype = group.dtype,
                           .in_place = true,
                           .order = args.order};
    BoundPlan plan = call.make_plan(key, args.algorithm, static_cast<Rank>(args.root), args.op);
    if (grid.world == 1 || group.bytes == 0) continue;
    for (std::size_t i : group.indices)
      bind_ranks(plan, std::span(grid.flat).subspan(i * grid.world, grid.world), call);
    call.plans.push_back(std::move(plan));
    call.bytes += group.bytes;
  }
  hold(std::move(args), call);
  return call;
}

}  // namespace pycollect
