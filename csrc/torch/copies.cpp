// Copies of tensors to every rank (replicate), and of one tensor into another (copy_).
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "../plan/error.h"
#include "collectives.h"
#include "tensor_layout.h"

namespace pycollect {
namespace {

// Adds offsets for these blocks to the plan, which owns them.
const PlanOffsets* add_offsets(DtypePlan& part, const Sizes& blocks) {
  return part.offsets.emplace_back(std::make_unique<PlanOffsets>(part.compiled->plan, blocks))
      .get();
}

// Checks that the tensors are on one device, and replaces those that are not dense by dense
// tensors, into which the call copies them.
void check_sources(Tensors& tensors, Rank root, PreparedCall& prepared) {
  prepared.held = tensors;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    at::Tensor& t = tensors[i];
    const ArgumentName label{"replicate", "tensors", static_cast<int>(i)};
    check_tensor(t, AccessMode::read, label);
    moved_dtype_of(t, label);
    require(t.device() == tensors[0].device(), "replicate: ", label, " is on ", t.device(),
            " and tensors[0] on ", tensors[0].device(), "; all must be on one device");
    if (t.is_non_overlapping_and_dense()) continue;
    const at::Tensor dense = at::empty(t.sizes(), t.options());
    check_tensor(dense, AccessMode::write, {"replicate", "a copy of an input"});
    prepared.add_layout_copy(dense, t, root);
    t = dense;
  }
}

// Binds the copies of one tensor to the results of all ranks. The root may be an additional last
// rank, which has no result.
void bind_copies(DtypePlan& part, const at::Tensor& source, std::span<const at::Tensor> results,
                 Rank root, PreparedCall& prepared) {
  std::vector<BufferMemory> memory(prepared.devices.size() * kBuffers);
  for (std::size_t r = 0; r < prepared.devices.size(); ++r)
    memory[r * kBuffers + 1] = {bytes_of(r < results.size() ? results[r] : source)};
  memory[root * kBuffers] = {bytes_of(source)};
  part.bind(add_offsets(part, {static_cast<std::size_t>(source.numel())}), std::move(memory), 1,
            prepared);
}

}  // namespace

PreparedCall replicate(Tensors tensors, const std::vector<at::Device>& devices, bool peer_access) {
  require(!devices.empty(), "replicate: devices is empty; name one device per rank");
  PreparedCall prepared{.call = "replicate", .devices = devices, .peer_access = peer_access};
  if (tensors.empty()) return prepared;
  const auto found = std::find(devices.begin(), devices.end(), tensors[0].device());
  const auto root = static_cast<Rank>(found - devices.begin());
  if (found == devices.end()) prepared.devices.push_back(tensors[0].device());
  check_sources(tensors, root, prepared);
  for (const at::Tensor& t : tensors)
    for (const at::Device& d : devices) {
      prepared.results.push_back(at::empty_like(t.detach(), t.options().device(d)));
      check_tensor(prepared.results.back(), AccessMode::write, {"replicate", "a result"});
    }
  const TensorGrid grid{std::move(tensors), 1};
  for (const DtypeGroup& group : dtype_groups("replicate", grid, moved_dtype_of)) {
    const int world = static_cast<int>(prepared.devices.size());
    DtypePlan part =
        make_dtype_plan({Collective::broadcast, world, group.bytes, group.dtype, false}, {}, root,
                        ReduceOp::sum, prepared);
    for (std::size_t i : group.indices)
      if (grid.flat[i].numel() > 0)
        bind_copies(part, grid.flat[i],
                    std::span(prepared.results).subspan(i * devices.size(), devices.size()), root,
                    prepared);
    prepared.parts.push_back(std::move(part));
    prepared.bytes += group.bytes;
  }
  return prepared;
}

PreparedCall copy(const at::Tensor& dst, const at::Tensor& src, bool peer_access) {
  const ArgumentName to{"copy_", "dst"}, from{"copy_", "src"};
  check_tensor(dst, AccessMode::write, to);
  check_tensor(src, AccessMode::read, from);
  require(dst.scalar_type() == src.scalar_type() && dst.sizes() == src.sizes(), "copy_: dst is ",
          dtype_name(dst), " of shape ", dst.sizes(), ", src is ", dtype_name(src), " of shape ",
          src.sizes(), "; their dtypes and shapes must be equal");
  const DType dtype = moved_dtype_of(dst, to);
  std::vector<ArgumentRange> extents{extent(dst, AccessMode::write, to),
                                     extent(src, AccessMode::read, from)};
  check_disjoint(extents);
  // A scatter from rank 0 to the last rank; on one device both are rank 0.
  PreparedCall prepared{.call = "copy_",
                        .devices = {src.device()},
                        .held = {dst, src},
                        .bytes = dst.nbytes(),
                        .peer_access = peer_access};
  if (dst.device() != src.device()) prepared.devices.push_back(dst.device());
  prepared.written.push_back(dst);
  if (dst.strides() != src.strides()) {
    prepared.layout_copies.push_back({dst.detach(), src.detach(), 0});
    return prepared;
  }
  const int world = static_cast<int>(prepared.devices.size());
  DtypePlan part = make_dtype_plan({Collective::scatter, world, prepared.bytes, dtype, false}, {},
                                   0, ReduceOp::sum, prepared);
  const auto item = static_cast<int64_t>(item_bytes(dtype));
  for (const Rectangle& rectangle : rectangles(dst)) {
    Sizes blocks(world);
    blocks.back() = static_cast<std::size_t>(rectangle.count);
    std::vector<BufferMemory> memory(prepared.devices.size() * kBuffers);
    memory[0] = {bytes_of(src) + rectangle.offset * item, rectangle.pitch * item};
    memory[(world - 1) * kBuffers + 1] = {bytes_of(dst) + rectangle.offset * item,
                                          rectangle.pitch * item};
    part.bind(add_offsets(part, blocks), std::move(memory), rectangle.rows, prepared);
  }
  prepared.parts.push_back(std::move(part));
  return prepared;
}

}  // namespace pycollect
