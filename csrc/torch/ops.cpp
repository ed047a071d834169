// Registers the collectives on lists as torch operators, for torch.compile, torch.export and other
// tracers. An operator whose name ends in "_" works in place, one with the overload name "out"
// writes the caller's tensors, and all others return new ones. Their shape functions are in
// pycollect/_fake_kernels.py, their gradients in pycollect/autograd/in_graph.py.
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>

#include "../plan/error.h"
#include "collectives.h"
#include "work.h"

namespace pycollect::ops {
namespace {

using Name = std::optional<std::string_view>;
// Names of devices: torch.export cannot save a list of devices.
using Devices = std::vector<std::string>;
using Lengths = at::OptionalIntArrayRef;

Tensors run_now(const ListCall& call) {
  call.commit();
  drain();
  call.run();
  return call.results;
}

InPlaceArgs all_reduce_args(const char* call, std::string_view op, Name algorithm) {
  return {.collective = Collective::all_reduce,
          .call = call,
          .op = op_named(op, call),
          .algorithm = algorithm.value_or("")};
}
InPlaceArgs reduce_args(int64_t dst, std::string_view op, Name algorithm) {
  return {.collective = Collective::reduce,
          .call = "reduce",
          .op = op_named(op, "reduce"),
          .root = dst,
          .algorithm = algorithm.value_or("")};
}
InPlaceArgs broadcast_args(const char* call, int64_t src, Name algorithm) {
  return {.collective = Collective::broadcast,
          .call = call,
          .root = src,
          .root_name = "src",
          .algorithm = algorithm.value_or("")};
}

void run_in_place(const InPlaceArgs& args, const Tensors& tensors) {
  run_now(in_place(args, {tensors, static_cast<int>(tensors.size())}));
}

// The tensors are [rank][index], and each rank has equally many.
TensorGrid grid(const char* call, at::TensorList tensors, int64_t world) {
  const auto size = static_cast<int64_t>(tensors.size());
  require(world > 0 && size % world == 0, call, ": ", size, " tensors for ", world,
          " ranks; pass equally many for each");
  Tensors flat;
  for (int64_t i = 0; i < size / world; ++i)
    for (int64_t r = 0; r < world; ++r) flat.push_back(tensors[r * (size / world) + i]);
  return {std::move(flat), static_cast<int>(world), "tensor_lists", true};
}

// Whether collectives in place accept the tensors as they are. The strides of dimensions of one
// element address nothing, and tracers do not know them.
bool alike(at::TensorList tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& t) {
    const at::Tensor& first = tensors[0];
    if (!t.is_non_overlapping_and_dense() || t.dim() != first.dim()) return false;
    for (int64_t d = 0; d < t.dim(); ++d)
      if (t.size(d) != 1 && t.stride(d) != first.stride(d)) return false;
    return true;
  });
}

// Tensors with the same values that collectives in place accept: those themselves, or contiguous
// copies. The copies come after the asynchronous calls that were made before. The check is of the
// originals, because a copy has no tangent of forward-mode differentiation.
Tensors laid_out_alike(at::TensorList tensors, const char* call) {
  for (std::size_t r = 0; r < tensors.size(); ++r)
    check_tensor(tensors[r], AccessMode::read, {call, "tensors", static_cast<int>(r)});
  drain();
  Tensors result = tensors.vec();
  if (!alike(tensors))
    for (at::Tensor& t : result) t = t.contiguous();
  return result;
}

at::Tensor copied(const at::Tensor& t) { return at::clone(t, at::MemoryFormat::Preserve); }

void all_reduce_(at::TensorList tensors, std::string_view op, Name algorithm) {
  run_in_place(all_reduce_args("all_reduce", op, algorithm), tensors.vec());
}

Tensors all_reduce(at::TensorList tensors, std::string_view op, Name algorithm) {
  Tensors results = laid_out_alike(tensors, "all_reduce");
  for (at::Tensor& t : results) t = copied(t);
  run_in_place(all_reduce_args("all_reduce", op, algorithm), results);
  return results;
}

void all_reduce_coalesced_(at::TensorList tensors, int64_t world, std::string_view op,
                           Name algorithm) {
  constexpr const char* kCall = "all_reduce_coalesced";
  run_now(in_place(all_reduce_args(kCall, op, algorithm), grid(kCall, tensors, world)));
}

void reduce_(at::TensorList tensors, int64_t dst, std::string_view op, Name algorithm) {
  run_in_place(reduce_args(dst, op, algorithm), tensors.vec());
}

at::Tensor reduce(at::TensorList tensors, int64_t dst, std::string_view op, Name algorithm) {
  const InPlaceArgs args = reduce_args(dst, op, algorithm);
  Tensors buffers = laid_out_alike(tensors, args.call);
  check_rank(dst, static_cast<int>(buffers.size()), args.call, args.root_name);
  at::Tensor& result = buffers[dst] = copied(buffers[dst]);
  run_in_place(args, buffers);
  return result;
}

void broadcast_(at::TensorList tensors, int64_t src, Name algorithm) {
  run_in_place(broadcast_args("broadcast", src, algorithm), tensors.vec());
}

Tensors broadcast(at::TensorList tensors, int64_t src, Name algorithm) {
  const InPlaceArgs args = broadcast_args("broadcast", src, algorithm);
  check_rank(src, static_cast<int>(tensors.size()), args.call, args.root_name);
  check_tensor(tensors[src], AccessMode::read, {args.call, "tensors", static_cast<int>(src)});
  drain();
  const at::Tensor source = copied(tensors[src]);
  Tensors results;
  for (const at::Tensor& t : tensors)
    results.push_back(at::empty_like(source, source.options().device(t.device())));
  results[src] = source;
  run_in_place(args, results);
  return results;
}

void broadcast_coalesced_(at::TensorList tensors, int64_t world, int64_t src) {
  constexpr const char* kCall = "broadcast_coalesced";
  run_now(in_place(broadcast_args(kCall, src, {}), grid(kCall, tensors, world)));
}

BlockArgs all_gather_args(int64_t dim, Name algorithm) {
  return {.collective = Collective::all_gather, .dim = dim, .algorithm = algorithm.value_or("")};
}
BlockArgs reduce_scatter_args(std::string_view op, int64_t dim, Name algorithm) {
  return {.collective = Collective::reduce_scatter,
          .op = op_named(op, "reduce_scatter"),
          .dim = dim,
          .algorithm = algorithm.value_or("")};
}

// `sizes` has one item per rank, which all ranks share, or the items of all ranks one after the
// other.
BlockArgs all_to_all_args(int64_t dim, Lengths sizes, std::size_t world) {
  BlockArgs args{.collective = Collective::all_to_all, .dim = dim};
  if (!sizes) return args;
  args.sizes.emplace();
  require(world > 0, "all_to_all: tensors is empty; pass one tensor per rank");
  for (std::size_t at = 0; at < std::max<std::size_t>(sizes->size(), 1); at += world)
    args.sizes->push_back(sizes->slice(at, std::min(world, sizes->size() - at)).vec());
  return args;
}

std::vector<at::Device> named(const Devices& devices) { return {devices.begin(), devices.end()}; }

BlockArgs scatter_args(const Devices& devices, Lengths sizes, int64_t dim) {
  BlockArgs args{.collective = Collective::scatter, .dim = dim, .devices = named(devices)};
  if (sizes) args.sizes = {{sizes->vec()}};
  return args;
}
BlockArgs gather_args(std::optional<at::Device> device, int64_t dim) {
  BlockArgs args{.collective = Collective::gather, .dim = dim};
  if (device) args.devices = {*device};
  return args;
}

Tensors moved(const BlockArgs& args, Tensors inputs) {
  return run_now(block_collective(args, std::move(inputs)));
}
void move_into(Tensors out, BlockArgs args, Tensors inputs) {
  args.out = std::move(out);
  moved(args, std::move(inputs));
}

Tensors all_gather(at::TensorList tensors, int64_t dim, Name algorithm) {
  return moved(all_gather_args(dim, algorithm), tensors.vec());
}
void all_gather_out(at::TensorList tensors, int64_t dim, Name algorithm, at::TensorList out) {
  move_into(out.vec(), all_gather_args(dim, algorithm), tensors.vec());
}

Tensors reduce_scatter(at::TensorList tensors, std::string_view op, int64_t dim, Name algorithm) {
  return moved(reduce_scatter_args(op, dim, algorithm), tensors.vec());
}
void reduce_scatter_out(at::TensorList tensors, std::string_view op, int64_t dim, Name algorithm,
                        at::TensorList out) {
  move_into(out.vec(), reduce_scatter_args(op, dim, algorithm), tensors.vec());
}

Tensors all_to_all(at::TensorList tensors, int64_t dim, Lengths sizes) {
  return moved(all_to_all_args(dim, sizes, tensors.size()), tensors.vec());
}
void all_to_all_out(at::TensorList tensors, int64_t dim, Lengths sizes, at::TensorList out) {
  move_into(out.vec(), all_to_all_args(dim, sizes, tensors.size()), tensors.vec());
}

Tensors scatter(const at::Tensor& tensor, const Devices& devices, Lengths sizes, int64_t dim) {
  return moved(scatter_args(devices, sizes, dim), {tensor});
}
void scatter_out(const at::Tensor& tensor, const Devices& devices, Lengths sizes, int64_t dim,
                 at::TensorList out) {
  move_into(out.vec(), scatter_args(devices, sizes, dim), {tensor});
}

at::Tensor gather(at::TensorList tensors, std::optional<at::Device> device, int64_t dim) {
  return moved(gather_args(device, dim), tensors.vec()).front();
}
void gather_out(at::TensorList tensors, std::optional<at::Device> device, int64_t dim,
                at::Tensor& out) {
  move_into({out}, gather_args(device, dim), tensors.vec());
}

// Result [index * world + rank] is the rank's copy.
Tensors replicate(at::TensorList tensors, const Devices& devices) {
  return run_now(pycollect::replicate(tensors.vec(), named(devices), true));
}

void copy_(at::Tensor& dst, const at::Tensor& src) { run_now(pycollect::copy(dst, src, true)); }

at::Tensor copy(const at::Tensor& tensor, at::Device device) {
  const at::Tensor result = at::empty_like(tensor, tensor.options().device(device));
  run_now(pycollect::copy(result, tensor, true));
  return result;
}

}  // namespace

TORCH_LIBRARY(pycollect, m) {
  m.def("all_reduce(Tensor[] tensors, str op='sum', *, str? algorithm=None) -> Tensor[]");
  m.def("all_reduce_(Tensor(a!)[] tensors, str op='sum', *, str? algorithm=None) -> ()");
  m.def(
      "all_reduce_coalesced_(Tensor(a!)[] tensors, int world, str op='sum', *, "
      "str? algorithm=None) -> ()");
  m.def("reduce(Tensor[] tensors, int dst=0, str op='sum', *, str? algorithm=None) -> Tensor");
  m.def("reduce_(Tensor(a!)[] tensors, int dst=0, str op='sum', *, str? algorithm=None) -> ()");
  m.def("broadcast(Tensor[] tensors, int src=0, *, str? algorithm=None) -> Tensor[]");
  m.def("broadcast_(Tensor(a!)[] tensors, int src=0, *, str? algorithm=None) -> ()");
  m.def("broadcast_coalesced_(Tensor(a!)[] tensors, int world, int src=0) -> ()");
  m.def("all_gather(Tensor[] tensors, int dim=0, *, str? algorithm=None) -> Tensor[]");
  m.def(
      "all_gather.out(Tensor[] tensors, int dim=0, *, str? algorithm=None, Tensor(a!)[] out) -> "
      "()");
  m.def(
      "reduce_scatter(Tensor[] tensors, str op='sum', int dim=0, *, str? algorithm=None) -> "
      "Tensor[]");
  m.def(
      "reduce_scatter.out(Tensor[] tensors, str op='sum', int dim=0, *, str? algorithm=None, "
      "Tensor(a!)[] out) -> ()");
  m.def("all_to_all(Tensor[] tensors, int dim=0, SymInt[]? split_sizes=None) -> Tensor[]");
  m.def(
      "all_to_all.out(Tensor[] tensors, int dim=0, SymInt[]? split_sizes=None, *, "
      "Tensor(a!)[] out) -> ()");
  m.def(
      "scatter(Tensor tensor, str[] devices, SymInt[]? chunk_sizes=None, int dim=0) -> "
      "Tensor[]");
  m.def(
      "scatter.out(Tensor tensor, str[] devices, SymInt[]? chunk_sizes=None, int dim=0, *, "
      "Tensor(a!)[] out) -> ()");
  m.def("gather(Tensor[] tensors, Device? device=None, int dim=0) -> Tensor");
  m.def("gather.out(Tensor[] tensors, Device? device=None, int dim=0, *, Tensor(a!) out) -> ()");
  m.def("replicate(Tensor[] tensors, str[] devices) -> Tensor[]");
  m.def("copy(Tensor tensor, Device device) -> Tensor");
  m.def("copy_(Tensor(a!) dst, Tensor src) -> ()");
}

namespace {

void register_kernels(torch::Library& m) {
  m.impl("all_reduce", &all_reduce);
  m.impl("all_reduce_", &all_reduce_);
  m.impl("all_reduce_coalesced_", &all_reduce_coalesced_);
  m.impl("reduce", &reduce);
  m.impl("reduce_", &reduce_);
  m.impl("broadcast", &broadcast);
  m.impl("broadcast_", &broadcast_);
  m.impl("broadcast_coalesced_", &broadcast_coalesced_);
  m.impl("all_gather", &all_gather);
  m.impl("all_gather.out", &all_gather_out);
  m.impl("reduce_scatter", &reduce_scatter);
  m.impl("reduce_scatter.out", &reduce_scatter_out);
  m.impl("all_to_all", &all_to_all);
  m.impl("all_to_all.out", &all_to_all_out);
  m.impl("scatter", &scatter);
  m.impl("scatter.out", &scatter_out);
  m.impl("gather", &gather);
  m.impl("gather.out", &gather_out);
  m.impl("replicate", &replicate);
  m.impl("copy", &copy);
  m.impl("copy_", &copy_);
}

}  // namespace

// The same functions serve every device. A build without CUDA refuses CUDA tensors in them.
TORCH_LIBRARY_IMPL(pycollect, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(pycollect, CUDA, m) { register_kernels(m); }

namespace {

// Refuses tensors that autograd tracks in calls that write tensors of their caller. The transforms
// of torch.func hide from the kernels that they track a tensor.
void refuse_tracked(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                    torch::jit::Stack* stack) {
  const auto check = [&](const at::Tensor& t) {
    const bool recorded = t.requires_grad() && at::GradMode::is_enabled();
    const bool has_tangent =
        t.unsafeGetTensorImpl()->autograd_meta() != nullptr && t._fw_grad(0).defined();
    require(!recorded && !has_tangent, op.schema().name(),
            ": a tensor requires grad or has a forward-mode tangent, and autograd does not record "
            "this collective; use pycollect.autograd, call it under torch.no_grad(), or pass "
            ".detach()");
  };
  for (const c10::IValue& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) check(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& t : value.toTensorVector()) check(t);
  }
  const at::AutoDispatchBelowAutograd below;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(pycollect, Autograd, m) {
  for (const char* name : {"all_reduce_", "all_reduce_coalesced_", "reduce_", "broadcast_",
                           "broadcast_coalesced_", "all_gather.out", "reduce_scatter.out",
                           "all_to_all.out", "scatter.out", "gather.out", "copy_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse_tracked>());
}

}  // namespace pycollect::ops
