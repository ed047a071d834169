// Operators on this rank's tensors in a group of torch.distributed: torch.ops.pycollect.group_*.
// They make the calls of dist.all_reduce and others, with the same checks, errors and results, but
// without what torch.distributed does in Python, for engines that make many small calls. Their
// shape functions and gradients are in pycollect/_group_operators.py. Also registers the kernels of
// c10d's operators that torch lacks.
#include <ATen/ops/clone.h>
#include <torch/library.h>

#include <numeric>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <typeinfo>

#include "../../plan/error.h"
#include "backend.h"
#include "builders.h"

namespace pycollect::dist {
namespace {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// Returns the backend as this library's own; null if it is another one, or if torch has wrapped it,
// as with TORCH_DISTRIBUTED_DEBUG=DETAIL.
Backend* own(c10d::Backend& backend) {
  return typeid(backend) == typeid(Backend) ? static_cast<Backend*>(&backend) : nullptr;
}

GroupPtr named(std::string_view name) { return c10d::resolve_process_group(std::string(name)); }

// Calls `call(backend)` for the group's backend of the tensor's device, and waits for its work.
template <class F>
void run(std::string_view group, const at::Tensor& tensor, const char* name, F&& call) {
  const GroupPtr of = named(group);
  require(!(tensor.requires_grad() && at::GradMode::is_enabled()), name,
          ": the tensor requires grad, and autograd does not record a call in place; call it under "
          "torch.no_grad(), or the operator without the last underscore");
  const auto backend = of->getBackend(tensor.device().type());
  if (own(*backend) == nullptr && backend->getBackendName() != kBackendName)
    reject(name, ": the group has the backend ", backend->getBackendName(), " for ",
           tensor.device().type(), " tensors; pass the name of a group of pycollect");
  if (const WorkPtr work = call(*backend)) work->wait();  // null: the call is coalesced
}

c10d::ReduceOp op_of(std::string_view name, const char* call) {
  const auto op = static_cast<std::size_t>(op_named(name, call));
  require(op < kTorchOps.size(), call, ": torch has no reduction ", name, " for groups");
  return kTorchOps[op];
}

// An uninitialised result with `rows` in the first dimension.
at::Tensor new_rows(const at::Tensor& input, int64_t rows) {
  std::vector<int64_t> sizes = input.sizes().vec();
  if (sizes.empty()) sizes.emplace_back();
  sizes[0] = rows;
  return at::empty(sizes, input.options());
}
int64_t rows_of(const at::Tensor& t) { return t.dim() == 0 ? 1 : t.size(0); }

// The operators.

void group_all_reduce_(at::Tensor& tensor, std::string_view op, std::string_view group) {
  constexpr const char* kCall = "group_all_reduce_";
  c10d::AllreduceOptions options;
  options.reduceOp = op_of(op, kCall);
  options.asyncOp = false;
  run(group, tensor, kCall, [&](c10d::Backend& b) {
    if (Backend* const backend = own(b)) return backend->all_reduce(tensor, options);
    Tensors tensors{tensor};
    return b.allreduce(tensors, options);
  });
}
at::Tensor group_all_reduce(const at::Tensor& tensor, std::string_view op, std::string_view group) {
  // The call checks the result, which no longer has what autograd knows of the tensor.
  check_tensor(tensor, AccessMode::read, {"group_all_reduce", "tensor"});
  at::Tensor result = at::clone(tensor.detach(), at::MemoryFormat::Contiguous);
  group_all_reduce_(result, op, group);
  return result;
}

void group_all_gather_(at::Tensor& output, const at::Tensor& input, std::string_view group) {
  at::Tensor in = input;
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  run(group, output, "group_all_gather_",
      [&](c10d::Backend& b) { return b._allgather_base(output, in, options); });
}
at::Tensor group_all_gather(const at::Tensor& input, std::string_view group) {
  at::Tensor output = new_rows(input, rows_of(input) * named(group)->getSize());
  group_all_gather_(output, input, group);
  return output;
}

void group_reduce_scatter_(at::Tensor& output, const at::Tensor& input, std::string_view op,
                           std::string_view group) {
  constexpr const char* kCall = "group_reduce_scatter_";
  at::Tensor in = input;
  c10d::ReduceScatterOptions options;
  options.reduceOp = op_of(op, kCall);
  options.asyncOp = false;
  run(group, output, kCall,
      [&](c10d::Backend& b) { return b._reduce_scatter_base(output, in, options); });
}
at::Tensor group_reduce_scatter(const at::Tensor& input, std::string_view op,
                                std::string_view group) {
  at::Tensor output = new_rows(input, rows_of(input) / named(group)->getSize());
  group_reduce_scatter_(output, input, op, group);
  return output;
}

void group_all_to_all_(at::Tensor& output, const at::Tensor& input, std::string_view group,
                       at::OptionalIntArrayRef output_splits,
                       at::OptionalIntArrayRef input_splits) {
  at::Tensor in = input;
  c10d::AllToAllOptions options;
  options.asyncOp = false;
  std::vector<int64_t> to, from;
  if (output_splits) to = output_splits->vec();
  if (input_splits) from = input_splits->vec();
  run(group, output, "group_all_to_all_",
      [&](c10d::Backend& b) { return b.alltoall_base(output, in, to, from, options); });
}
at::Tensor group_all_to_all(const at::Tensor& input, std::string_view group,
                            at::OptionalIntArrayRef output_splits,
                            at::OptionalIntArrayRef input_splits) {
  int64_t rows = rows_of(input);
  if (output_splits && !output_splits->empty())
    rows = std::accumulate(output_splits->begin(), output_splits->end(), int64_t{});
  at::Tensor output = new_rows(input, rows);
  group_all_to_all_(output, input, group, output_splits, input_splits);
  return output;
}

void register_kernels(torch::Library& m) {
  m.impl("group_all_reduce", &group_all_reduce);
  m.impl("group_all_reduce_", &group_all_reduce_);
  m.impl("group_all_gather", &group_all_gather);
  m.impl("group_all_gather_", &group_all_gather_);
  m.impl("group_reduce_scatter", &group_reduce_scatter);
  m.impl("group_reduce_scatter_", &group_reduce_scatter_);
  m.impl("group_all_to_all", &group_all_to_all);
  m.impl("group_all_to_all_", &group_all_to_all_);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(pycollect, m) {
  m.def("group_all_reduce(Tensor tensor, str op, str group_name) -> Tensor");
  m.def("group_all_reduce_(Tensor(a!) tensor, str op, str group_name) -> ()");
  m.def("group_all_gather(Tensor input, str group_name) -> Tensor");
  m.def("group_all_gather_(Tensor(a!) output, Tensor input, str group_name) -> ()");
  m.def("group_reduce_scatter(Tensor input, str op, str group_name) -> Tensor");
  m.def("group_reduce_scatter_(Tensor(a!) output, Tensor input, str op, str group_name) -> ()");
  m.def(
      "group_all_to_all(Tensor input, str group_name, SymInt[]? output_split_sizes=None, "
      "SymInt[]? input_split_sizes=None) -> Tensor");
  m.def(
      "group_all_to_all_(Tensor(a!) output, Tensor input, str group_name, "
      "SymInt[]? output_split_sizes=None, SymInt[]? input_split_sizes=None) -> ()");
}
TORCH_LIBRARY_IMPL(pycollect, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(pycollect, CUDA, m) { register_kernels(m); }
// The operators in place refuse a tensor whose gradient is recorded, so that they need no kernel of
// autograd's; torch's own, for operators without one, takes a tenth of a small call.
TORCH_LIBRARY_IMPL(pycollect, Autograd, m) {
  for (const char* const name :
       {"group_all_reduce_", "group_all_gather_", "group_reduce_scatter_", "group_all_to_all_"})
    m.impl(name, torch::CppFunction::makeFallthrough());
}

namespace {

// torch has no kernels of this operator for sparse tensors. Those for dense tensors pass any
// tensors on to the backend.
template <c10::DispatchKey dense>
void call_dense(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(dense), stack);
}

template <c10::DispatchKey dense>
void implement(torch::Library& library) {
  library.impl("allreduce_coalesced_",
               torch::CppFunction::makeFromBoxedFunction<&call_dense<dense>>());
}

}  // namespace

TORCH_LIBRARY_IMPL(c10d, SparseCPU, m) { implement<c10::DispatchKey::CPU>(m); }
TORCH_LIBRARY_IMPL(c10d, SparseCUDA, m) { implement<c10::DispatchKey::CUDA>(m); }

}  // namespace pycollect::dist
