// Collectives that overwrite what they are given.
#include <algorithm>

#include "../plan/error.h"
#include "collectives.h"
#include "layout.h"

namespace pycollect {
namespace {

bool reducing(Collective c) { return c == Collective::all_reduce || c == Collective::reduce; }

void check(const InPlaceArgs& ask, const TensorGrid& grid) {
  std::vector<Extent> extents;
  extents.reserve(grid.flat.size());
  for (std::size_t i = 0; i < grid.width(); ++i)
    for (Rank r = 0; r < grid.world; ++r) {
      const at::Tensor& t = grid.flat[i * grid.world + r];
      const Label label = grid.label(ask.call, i, r);
      check_tensor(t, access_of(ask, r), label);
      require(t.device() == grid.flat[r].device(), ask.call, ": ", label, " is on ", t.device(),
              " and ", grid.label(ask.call, 0, r), " on ", grid.flat[r].device(),
              "; a rank's tensors are all on its device");
      if (r > 0)
        check_alike(t, label, grid.flat[i * grid.world], grid.label(ask.call, i, 0),
                    Alike::shape_and_layout);
      else if (const DType dtype = dtype_of(t, label); reducing(ask.collective))
        check_op(dtype, ask.op, ask.call);
      extents.push_back(extent(t, access_of(ask, r), label));
    }
  check_disjoint(extents);
}

// One tensor of every rank, rectangle by rectangle.
void bind_ranks(DtypePlan& part, std::span<const at::Tensor> ranks, PreparedCall& job) {
  const std::size_t item = item_bytes(part.dtype);
  const Offsets* at = nullptr;
  for (const Rectangle& run : rectangles(ranks[0])) {
    if (at == nullptr)  // all rectangles of a tensor are alike
      at = part.offsets
               .emplace_back(std::make_unique<Offsets>(
                   part.compiled->plan, Sizes{static_cast<std::size_t>(run.count)},
                   std::max<std::size_t>(kAlignBytes / item, 1)))
               .get();
    std::vector<Memory> memory(ranks.size() * kBuffers);
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      const Memory m{bytes_of(ranks[r]) + run.offset * static_cast<int64_t>(item),
                     run.pitch * static_cast<int64_t>(item)};
      memory[r * kBuffers] = memory[r * kBuffers + 1] = m;
    }
    part.bind(at, std::move(memory), run.rows, job);
  }
}

}  // namespace

AccessMode access_of(const InPlaceArgs& ask, int64_t rank) {
  const bool writes = ask.collective == Collective::all_reduce ||
                      (ask.collective == Collective::reduce) == (rank == ask.root);
  return writes ? AccessMode::write : AccessMode::read;
}

PreparedCall in_place(const InPlaceArgs& ask, TensorGrid grid) {
  require(grid.world > 0, ask.call, ": ", grid.list, " is empty; pass one tensor per rank");
  check_rank(ask.root, grid.world, ask.call, ask.root_name);
  check(ask, grid);
  PreparedCall job{.call = ask.call, .peer_access = ask.peer_access};
  for (Rank r = 0; r < grid.world && !grid.flat.empty(); ++r)
    job.devices.push_back(grid.flat[r].device());
  for (const DtypeGroup& kind : dtype_groups(ask.call, grid)) {
    const CallKey situation{ask.collective, grid.world, kind.bytes, kind.dtype, true};
    DtypePlan part =
        make_dtype_plan(situation, ask.algorithm, static_cast<Rank>(ask.root), ask.op, job);
    if (grid.world == 1 || kind.bytes == 0) continue;
    for (std::size_t i : kind.indices)
      bind_ranks(part, std::span(grid.flat).subspan(i * grid.world, grid.world), job);
    job.parts.push_back(std::move(part));
    job.bytes += kind.bytes;
  }
  for (std::size_t i = 0; i < grid.flat.size(); ++i)
    if (access_of(ask, i % grid.world) == AccessMode::write) job.written.push_back(grid.flat[i]);
  job.held.insert(job.held.end(), std::make_move_iterator(grid.flat.begin()),
                  std::make_move_iterator(grid.flat.end()));
  return job;
}

}  // namespace pycollect
