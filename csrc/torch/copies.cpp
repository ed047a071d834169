// Copies: of many tensors to every rank (replicate), and of one tensor into another (copy_).
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "../plan/error.h"
#include "collectives.h"
#include "layout.h"
#include "threads.h"

namespace pycollect {
namespace {

const Offsets* keep(DtypePlan& part, const Sizes& blocks) {
  return part.offsets.emplace_back(std::make_unique<Offsets>(part.compiled->plan, blocks)).get();
}

// Dense and on one device; a tensor with gaps is laid anew.
void check_sources(Tensors& tensors) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    at::Tensor& t = tensors[i];
    const Label label{"replicate", "tensors", static_cast<int>(i)};
    check_tensor(t, AccessMode::read, label);
    dtype_of(t, label);
    require(t.device() == tensors[0].device(), "replicate: ", label, " is on ", t.device(),
            " and tensors[0] on ", tensors[0].device(), "; all must be on one device");
    if (t.is_non_overlapping_and_dense()) continue;
    const at::Tensor dense = at::empty(t.sizes(), t.options());
    check_tensor(dense, AccessMode::write, {"replicate", "a copy of an input"});
    copy_strided(dense, t);
    t = dense;
  }
}

// One tensor into the results of all ranks; the root may be a rank behind them, which has none.
void bind_copies(DtypePlan& part, const at::Tensor& source, std::span<const at::Tensor> results,
                 Rank root, PreparedCall& job) {
  std::vector<Memory> memory(job.devices.size() * kBuffers);
  for (std::size_t r = 0; r < job.devices.size(); ++r)
    memory[r * kBuffers + 1] = {bytes_of(r < results.size() ? results[r] : source)};
  memory[root * kBuffers] = {bytes_of(source)};
  part.bind(keep(part, {static_cast<std::size_t>(source.numel())}), std::move(memory), 1, job);
}

}  // namespace

PreparedCall replicate(Tensors tensors, const std::vector<at::Device>& devices, bool peer_access) {
  require(!devices.empty(), "replicate: devices is empty; name one device per rank");
  PreparedCall job{.call = "replicate", .devices = devices, .peer_access = peer_access};
  if (tensors.empty()) return job;
  check_sources(tensors);
  for (const at::Tensor& t : tensors)
    for (const at::Device& d : devices) {
      job.results.push_back(at::empty_like(t.detach(), t.options().device(d)));
      check_tensor(job.results.back(), AccessMode::write, {"replicate", "a result"});
    }
  const auto found = std::find(devices.begin(), devices.end(), tensors[0].device());
  const auto root = static_cast<Rank>(found - devices.begin());
  if (found == devices.end()) job.devices.push_back(tensors[0].device());
  const TensorGrid grid{std::move(tensors), 1};
  for (const DtypeGroup& kind : dtype_groups("replicate", grid)) {
    const int world = static_cast<int>(job.devices.size());
    DtypePlan part = make_dtype_plan({Collective::broadcast, world, kind.bytes, kind.dtype, false},
                                     {}, root, ReduceOp::sum, job);
    for (std::size_t i : kind.indices)
      if (grid.flat[i].numel() > 0)
        bind_copies(part, grid.flat[i],
                    std::span(job.results).subspan(i * devices.size(), devices.size()), root, job);
    job.parts.push_back(std::move(part));
    job.bytes += kind.bytes;
  }
  job.held.insert(job.held.end(), grid.flat.begin(), grid.flat.end());
  return job;
}

PreparedCall copy(const at::Tensor& dst, const at::Tensor& src, bool peer_access) {
  const Label to{"copy_", "dst"}, from{"copy_", "src"};
  check_tensor(dst, AccessMode::write, to);
  check_tensor(src, AccessMode::read, from);
  check_alike(src, from, dst, to, Alike::shape);
  const DType dtype = dtype_of(dst, to);
  std::vector<Extent> extents{extent(dst, AccessMode::write, to),
                              extent(src, AccessMode::read, from)};
  check_disjoint(extents);
  // From rank 0 to the last, which are the same rank on one device.
  PreparedCall job{.call = "copy_",
                   .devices = {src.device()},
                   .held = {dst, src},
                   .bytes = dst.nbytes(),
                   .peer_access = peer_access};
  if (dst.device() != src.device()) job.devices.push_back(dst.device());
  job.written.push_back(dst);
  if (dst.strides() != src.strides()) {
    job.transposes.emplace_back(dst.detach(), src.detach());
    return job;
  }
  const int world = static_cast<int>(job.devices.size());
  DtypePlan part = make_dtype_plan({Collective::scatter, world, job.bytes, dtype, false}, {}, 0,
                                   ReduceOp::sum, job);
  const auto item = static_cast<int64_t>(item_bytes(dtype));
  for (const Rectangle& run : rectangles(dst)) {
    Sizes blocks(world);
    blocks.back() = static_cast<std::size_t>(run.count);
    std::vector<Memory> memory(job.devices.size() * kBuffers);
    memory[0] = {bytes_of(src) + run.offset * item, run.pitch * item};
    memory[(world - 1) * kBuffers + 1] = {bytes_of(dst) + run.offset * item, run.pitch * item};
    part.bind(keep(part, blocks), std::move(memory), run.rows, job);
  }
  job.parts.push_back(std::move(part));
  return job;
}

}  // namespace pycollect
