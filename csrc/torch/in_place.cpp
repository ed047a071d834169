// Collectives that overwrite their input tensors.
#include <algorithm>

#include "../plan/error.h"
#include "collectives.h"
#include "tensor_layout.h"

namespace pycollect {
namespace {

bool is_reduction(Collective c) { return c == Collective::all_reduce || c == Collective::reduce; }
DtypeOf dtype_of(const InPlaceArgs& args) {
  return is_reduction(args.collective) ? pycollect::dtype_of : moved_dtype_of;
}

void check(const InPlaceArgs& args, const TensorGrid& grid) {
  std::vector<ArgumentRange> extents;
  extents.reserve(grid.flat.size());
  for (std::size_t i = 0; i < grid.width(); ++i)
    for (Rank r = 0; r < grid.world; ++r) {
      const at::Tensor& t = grid.flat[i * grid.world + r];
      const ArgumentName label = grid.label(args.call, i, r);
      check_tensor(t, access_of(args, r), label);
      require(t.device() == grid.flat[r].device(), args.call, ": ", label, " is on ", t.device(),
              " and ", grid.label(args.call, 0, r), " on ", grid.flat[r].device(),
              "; all tensors of a rank must be on one device");
      if (r > 0)
        check_alike(t, label, grid.flat[i * grid.world], grid.label(args.call, i, 0),
                    Alike::shape_and_layout);
      else if (const DType dtype = dtype_of(args)(t, label); is_reduction(args.collective))
        check_op(dtype, args.op, args.call);
      extents.push_back(extent(t, access_of(args, r), label));
    }
  check_disjoint(extents);
}

// Binds one tensor of every rank: one binding for each of its rectangles.
void bind_ranks(DtypePlan& part, std::span<const at::Tensor> ranks, PreparedCall& prepared) {
  const std::size_t item = item_bytes(part.dtype);
  const PlanOffsets* offsets = nullptr;
  for (const Rectangle& rectangle : rectangles(ranks[0])) {
    if (offsets == nullptr)  // all rectangles of a tensor have equal counts
      offsets = part.offsets
                    .emplace_back(std::make_unique<PlanOffsets>(
                        part.compiled->plan, Sizes{static_cast<std::size_t>(rectangle.count)},
                        std::max<std::size_t>(kAlignBytes / item, 1)))
                    .get();
    std::vector<BufferMemory> memory(ranks.size() * kBuffers);
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      const BufferMemory m{bytes_of(ranks[r]) + rectangle.offset * static_cast<int64_t>(item),
                           rectangle.pitch * static_cast<int64_t>(item)};
      memory[r * kBuffers] = memory[r * kBuffers + 1] = m;
    }
    part.bind(offsets, std::move(memory), rectangle.rows, prepared);
  }
}

}  // namespace

AccessMode access_of(const InPlaceArgs& args, int64_t rank) {
  const bool writes = args.collective == Collective::all_reduce ||
                      (args.collective == Collective::reduce) == (rank == args.root);
  return writes ? AccessMode::write : AccessMode::read;
}

PreparedCall in_place(const InPlaceArgs& args, TensorGrid grid) {
  require(grid.world > 0, args.call, ": ", grid.list, " is empty; pass one tensor per rank");
  check_rank(args.root, grid.world, args.call, args.root_name);
  check(args, grid);
  PreparedCall prepared{
      .call = args.call, .streams = args.streams, .peer_access = args.peer_access};
  for (Rank r = 0; r < grid.world && !grid.flat.empty(); ++r)
    prepared.devices.push_back(grid.flat[r].device());
  for (const DtypeGroup& group : dtype_groups(args.call, grid, dtype_of(args))) {
    const SelectionKey key{args.collective, grid.world, group.bytes, group.dtype, true};
    DtypePlan part =
        make_dtype_plan(key, args.algorithm, static_cast<Rank>(args.root), args.op, prepared);
    if (grid.world == 1 || group.bytes == 0) continue;
    for (std::size_t i : group.indices)
      bind_ranks(part, std::span(grid.flat).subspan(i * grid.world, grid.world), prepared);
    prepared.parts.push_back(std::move(part));
    prepared.bytes += group.bytes;
  }
  for (std::size_t i = 0; i < grid.flat.size(); ++i)
    if (access_of(args, i % grid.world) == AccessMode::write)
      prepared.written.push_back(grid.flat[i]);
  prepared.held.insert(prepared.held.end(), std::make_move_iterator(grid.flat.begin()),
                       std::make_move_iterator(grid.flat.end()));
  return prepared;
}

}  // namespace pycollect
