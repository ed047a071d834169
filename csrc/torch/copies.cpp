// Copies of tensors to every rank (replicate), and of one tensor into another (copy_).
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "../plan/error.h"
#include "collectives.h"
#include "tensor_layout.h"

namespace pycollect {
namespace {

// Checks that the tensors are on one device, and replaces those that are not dense by dense
// tensors, into which the call copies them. Returns their groups.
DtypeGroups check_sources(Tensors& tensors, Rank root, ListCall& call) {
  call.held = tensors;
  DtypeGroups groups;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    at::Tensor& t = tensors[i];
    const ArgumentName label{"replicate", "tensors", static_cast<int>(i)};
    check_tensor(t, AccessMode::read, label);
    add(groups, moved_dtype_of(t, label), i, t.nbytes());
    require(t.device() == tensors[0].device(), "replicate: ", label, " is on ", t.device(),
            " and tensors[0] on ", tensors[0].device(), "; all must be on one device");
    if (t.is_non_overlapping_and_dense()) continue;
    const at::Tensor dense = at::empty(t.sizes(), t.options());
    check_tensor(dense, AccessMode::write, {"replicate", "a copy of an input"});
    call.add_layout_copy(dense, t, root);
    t = dense;
  }
  return groups;
}

// Binds the copies of one tensor to the results of all ranks. The root may be an additional last
// rank, which has no result.
void bind_copies(BoundPlan& plan, const at::Tensor& source, std::span<const at::Tensor> results,
                 Rank root, ListCall& call) {
  std::vector<BufferMemory> memory(call.devices.size() * kBuffers);
  for (std::size_t r = 0; r < call.devices.size(); ++r)
    memory[r * kBuffers + 1] = {bytes_of(r < results.size() ? results[r] : source)};
  memory[root * kBuffers] = {bytes_of(source)};
  const auto count = static_cast<std::size_t>(source.numel());
  call.bind(plan, PlanOffsets(plan.compiled.plan, {&count, 1}), std::move(memory));
}

}  // namespace

ListCall replicate(ListArgs args) {
  Tensors& tensors = args.inputs.flat;
  const DeviceList& devices = args.devices;
  require(!devices.empty(), "replicate: devices is empty; name one device per rank");
  ListCall call{.name = "replicate", .devices = devices, .peer_access = args.peer_access};
  if (tensors.empty()) return call;
  const auto found = std::find(devices.begin(), devices.end(), tensors[0].device());
  const auto root = static_cast<Rank>(found - devices.begin());
  if (found == devices.end()) call.devices.push_back(tensors[0].device());
  const DtypeGroups groups = check_sources(tensors, root, call);
  for (const at::Tensor& t : tensors)
    for (const at::Device& d : devices) {
      call.results.push_back(at::empty_like(t.detach(), t.options().device(d)));
      check_tensor(call.results.back(), AccessMode::write, {"replicate", "a result"});
    }
  const int world = static_cast<int>(call.devices.size());
  for (const DtypeGroup& group : groups) {
    BoundPlan plan = call.make_plan({Collective::broadcast, world, group.bytes, group.dtype, false},
                                    {}, root, ReduceOp::sum);
    for (std::size_t i : group.indices)
      if (tensors[i].numel() > 0)
        bind_copies(plan, tensors[i],
                    std::span(call.results).subspan(i * devices.size(), devices.size()), root,
                    call);
    call.plans.push_back(std::move(plan));
    call.bytes += group.bytes;
  }
  return call;
}

ListCall copy(ListArgs args) {
  const at::Tensor &dst = args.inputs.flat[0], &src = args.inputs.flat[1];
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
  ListCall call{.name = "copy_",
                .devices = {src.device()},
                .written = {dst},
                .held = {src},
                .bytes = dst.nbytes(),
                .peer_access = args.peer_access};
  if (dst.device() != src.device()) call.devices.push_back(dst.device());
  if (dst.strides() != src.strides()) {
    call.layout_copies.push_back({dst.detach(), src.detach(), 0});
    return call;
  }
  const int world = static_cast<int>(call.devices.size());
  BoundPlan plan =
      call.make_plan({Collective::scatter, world, call.bytes, dtype, false}, {}, 0, ReduceOp::sum);
  for (const Rectangle& rectangle : rectangles(dst)) {
    Sizes blocks(world);
    blocks.back() = static_cast<std::size_t>(rectangle.count);
    std::vector<BufferMemory> memory(call.devices.size() * kBuffers);
    memory[0] = rectangle.of(src);
    memory[(world - 1) * kBuffers + 1] = rectangle.of(dst);
    call.bind(plan, PlanOffsets(plan.compiled.plan, blocks), std::move(memory),
              static_cast<std::size_t>(rectangle.rows));
  }
  call.plans.push_back(std::move(plan));
  return call;
}

}  // namespace pycollect
