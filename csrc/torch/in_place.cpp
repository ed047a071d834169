// Collectives that overwrite what they are given, and the one that copies it to everybody.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "../plan/error.h"
#include "collectives.h"
#include "layout.h"
#include "threads.h"

namespace pycollect {
namespace {

constexpr std::size_t kAlignBytes = 64;  // pieces begin at whole vectors

bool reducing(Collective c) { return c == Collective::all_reduce || c == Collective::reduce; }

void check(const InPlace& ask, const Grid& grid) {
  std::vector<Extent> extents;
  extents.reserve(grid.flat.size());
  for (std::size_t i = 0; i < grid.width(); ++i)
    for (Rank r = 0; r < grid.world; ++r) {
      const at::Tensor& t = grid.flat[i * grid.world + r];
      const Label label = grid.label(ask.call, i, r);
      check_tensor(t, use_of(ask, r), label);
      if (r > 0)
        check_alike(t, label, grid.flat[i * grid.world], grid.label(ask.call, i, 0),
                    Alike::shape_and_layout);
      else if (const DType dtype = dtype_of(t, label); reducing(ask.collective))
        check_op(dtype, ask.op, ask.call);
      extents.push_back(extent(t, use_of(ask, r), label));
    }
  check_disjoint(extents);
}

// What autograd has saved of this is no longer what it holds.
void bump_version(const at::Tensor& t) {
  if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
}

// Without asking for the right to write, which would be a copy of a lazy clone that is only read;
// who is written was asked for that when its extent was.
std::byte* bytes_of(const at::Tensor& t) {
  return static_cast<std::byte*>(const_cast<void*>(t.const_data_ptr()));
}

// One tensor of every rank, rectangle by rectangle.
void bind_ranks(Part& part, std::span<const at::Tensor> ranks, Tensors& held) {
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
    part.bind(at, std::move(memory), run.rows, held);
  }
}

// Indices of the grid by dtype, in order of appearance, and the bytes of each.
struct Kind {
  DType dtype;
  std::size_t bytes = 0;
  std::vector<std::size_t> indices = {};
};
std::vector<Kind> kinds(const char* call, const Grid& grid) {
  std::vector<Kind> all;
  for (std::size_t i = 0; i < grid.width(); ++i) {
    const at::Tensor& t = grid.flat[i * grid.world];
    const DType dtype = dtype_of(t, grid.label(call, i, 0));
    auto kind =
        std::find_if(all.begin(), all.end(), [&](const Kind& k) { return k.dtype == dtype; });
    if (kind == all.end()) kind = all.insert(all.end(), {dtype});
    kind->bytes += t.nbytes();
    kind->indices.push_back(i);
  }
  return all;
}

}  // namespace

Use use_of(const InPlace& ask, int64_t rank) {
  const bool writes = ask.collective == Collective::all_reduce ||
                      (ask.collective == Collective::reduce) == (rank == ask.root);
  return writes ? Use::write : Use::read;
}

Job in_place(const InPlace& ask, Grid grid) {
  require(grid.world > 0, ask.call, ": ", grid.list, " is empty; pass one tensor per rank");
  check_rank(ask.root, grid.world, ask.call, ask.root_name);
  check(ask, grid);
  Job job;
  for (const Kind& kind : kinds(ask.call, grid)) {
    const Situation situation{ask.collective, grid.world, kind.bytes, kind.dtype, true};
    Part part = make_part(situation, ask.algorithm, static_cast<Rank>(ask.root), ask.op);
    if (grid.world == 1 || kind.bytes == 0) continue;
    for (std::size_t i : kind.indices)
      bind_ranks(part, std::span(grid.flat).subspan(i * grid.world, grid.world), job.held);
    job.parts.push_back(std::move(part));
    job.bytes += kind.bytes;
  }
  for (std::size_t i = 0; i < grid.flat.size(); ++i)
    if (use_of(ask, i % grid.world) == Use::write) bump_version(grid.flat[i]);
  job.held.insert(job.held.end(), std::make_move_iterator(grid.flat.begin()),
                  std::make_move_iterator(grid.flat.end()));
  return job;
}

Job replicate(Tensors tensors, int world) {
  require(world > 0, "replicate: devices is empty; name one device per rank");
  Grid grid{std::move(tensors), 1};
  for (std::size_t i = 0; i < grid.flat.size(); ++i) {
    const Label label{"replicate", "tensors", static_cast<int>(i)};
    dtype_of(grid.flat[i], label);
    check_tensor(grid.flat[i], Use::read, label);
    if (grid.flat[i].is_non_overlapping_and_dense()) continue;
    const at::Tensor dense = at::empty(grid.flat[i].sizes(), grid.flat[i].options());
    check_tensor(dense, Use::write, {"replicate", "a copy of an input"});
    lay(dense, grid.flat[i]);
    grid.flat[i] = dense;
  }
  Job job;
  for (const at::Tensor& t : grid.flat)
    for (Rank r = 0; r < world; ++r) job.results.push_back(at::empty_like(t.detach()));
  for (const at::Tensor& t : job.results) check_tensor(t, Use::write, {"replicate", "a result"});
  for (const Kind& kind : kinds("replicate", grid)) {
    Part part = make_part({Collective::broadcast, world, kind.bytes, kind.dtype, false}, {}, 0,
                          ReduceOp::sum);
    for (std::size_t i : kind.indices) {
      const auto count = static_cast<std::size_t>(grid.flat[i].numel());
      if (count == 0) continue;
      std::vector<Memory> memory(static_cast<std::size_t>(world) * kBuffers);
      memory[0] = {bytes_of(grid.flat[i])};
      for (Rank r = 0; r < world; ++r)
        memory[r * kBuffers + 1] = {bytes_of(job.results[i * world + r])};
      const Offsets* at =
          part.offsets.emplace_back(std::make_unique<Offsets>(part.compiled->plan, Sizes{count}))
              .get();
      part.bind(at, std::move(memory), 1, job.held);
    }
    job.parts.push_back(std::move(part));
    job.bytes += kind.bytes;
  }
  job.held.insert(job.held.end(), grid.flat.begin(), grid.flat.end());
  return job;
}

Job copy(const at::Tensor& dst, const at::Tensor& src) {
  const Label to{"copy_", "dst"}, from{"copy_", "src"};
  check_tensor(dst, Use::write, to);
  check_tensor(src, Use::read, from);
  check_alike(src, from, dst, to, Alike::shape);
  const DType dtype = dtype_of(dst, to);
  std::vector<Extent> extents{extent(dst, Use::write, to), extent(src, Use::read, from)};
  check_disjoint(extents);
  Job job{.held = {dst, src}, .bytes = dst.nbytes()};
  bump_version(dst);
  if (dst.strides() != src.strides()) {
    job.transposes.emplace_back(dst.detach(), src.detach());
    return job;
  }
  Part part = make_part({Collective::broadcast, 1, job.bytes, dtype, false}, {}, 0, ReduceOp::sum);
  const auto item = static_cast<int64_t>(item_bytes(dtype));
  for (const Rectangle& run : rectangles(dst)) {
    const auto count = static_cast<std::size_t>(run.count);
    const Offsets* at =
        part.offsets.emplace_back(std::make_unique<Offsets>(part.compiled->plan, Sizes{count}))
            .get();
    auto memory = [&](const void* p) -> Memory {
      return {static_cast<std::byte*>(const_cast<void*>(p)) + run.offset * item, run.pitch * item};
    };
    part.bind(at, {memory(src.const_data_ptr()), memory(dst.mutable_data_ptr()), {}}, run.rows,
              job.held);
  }
  job.parts.push_back(std::move(part));
  return job;
}

}  // namespace pycollect
