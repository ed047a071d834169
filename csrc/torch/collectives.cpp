// Collectives on whole tensors: in place (all_reduce, reduce, broadcast), the sum in tree order of
// tensors of one device, and copies to every rank or into one tensor. See block_collectives.cpp for
// those that cut tensors.
#include "collectives.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "../plan/error.h"
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
  c10::SmallVector<ArgumentExtent, 8> extents;
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
        check_matches(t, label, grid.flat[i * grid.world], grid.label(args.call, i, 0),
                      Match::shape_and_layout);
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
  ListCall call{.name = args.call, .streams = args.streams, .peer_access = args.peer_access};
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

namespace {

DType check(const Tensors& tensors) {
  require(!tensors.empty(), "tree_sum: tensors is empty; pass at least one tensor");
  const ArgumentName first{"tree_sum", "tensors", 0};
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& t = tensors[i];
    const ArgumentName label{"tree_sum", "tensors", static_cast<int>(i)};
    check_tensor(t, AccessMode::read, label);
    check_matches(t, label, tensors[0], first, Match::shape);
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
  if (have_one_dense_layout(tensors)) return;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    at::Tensor& t = tensors[i];
    if (!t.is_contiguous())
      call.replace(t, at::empty(t.sizes(), t.options()), static_cast<Rank>(i));
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
    if (!t.is_non_overlapping_and_dense()) call.replace(t, at::empty(t.sizes(), t.options()), root);
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
  std::vector<ArgumentExtent> extents{extent(dst, AccessMode::write, to),
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
