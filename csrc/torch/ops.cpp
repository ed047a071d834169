// Registers the collectives on lists as torch operators, for torch.compile, torch.export and other
// tracers. An operator whose name ends in "_" works in place, one with the overload name "out"
// writes the caller's tensors, and all others return new ones. Their shape functions are in
// pycollect/_fake_kernels.py, their gradients in pycollect/autograd/in_graph.py.
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>

#include "../plan/error.h"
#include "declarations.h"
#include "list_call.h"
#include "tensor_layout.h"

namespace pycollect::ops {
namespace {

Tensors run_now(const ListCall& call) {
  call.commit();
  drain();
  call.run();
  return call.results;
}

// Replaces the inputs by tensors with the same values that collectives in place accept: contiguous
// copies, if they are not such tensors. The copies come after the asynchronous calls that were made
// before. The check is of the originals, because a copy has no tangent of forward-mode
// differentiation.
void to_one_layout(ListArgs& args) {
  Tensors& tensors = args.inputs.flat;
  for (std::size_t r = 0; r < tensors.size(); ++r)
    check_tensor(tensors[r], AccessMode::read, {args.call, "tensors", static_cast<int>(r)});
  drain();
  if (!have_one_dense_layout(tensors))
    for (at::Tensor& t : tensors) t = t.contiguous();
}

at::Tensor copied(const at::Tensor& t) { return at::clone(t, at::MemoryFormat::Preserve); }

// Each function runs a collective in place on new tensors, and returns its results.
Tensors all_reduced(ListArgs args) {
  to_one_layout(args);
  for (at::Tensor& t : args.inputs.flat) t = copied(t);
  Tensors results = args.inputs.flat;
  run_now(in_place(std::move(args)));
  return results;
}

Tensors reduced(ListArgs args) {
  to_one_layout(args);
  check_rank(args.root, args.inputs.world, args.call, root_name(args.collective));
  at::Tensor& buffer = args.inputs.flat[args.root];
  const at::Tensor result = buffer = copied(buffer);
  run_now(in_place(std::move(args)));
  return {result};
}

Tensors broadcasted(ListArgs args) {
  check_rank(args.root, args.inputs.world, args.call, root_name(args.collective));
  Tensors& tensors = args.inputs.flat;
  const ArgumentName label{args.call, "tensors", static_cast<int>(args.root)};
  check_tensor(tensors[args.root], AccessMode::read, label);
  drain();
  const at::Tensor source = copied(tensors[args.root]);
  for (at::Tensor& t : tensors) t = at::empty_like(source, source.options().device(t.device()));
  tensors[args.root] = source;
  Tensors results = tensors;
  run_now(in_place(std::move(args)));
  return results;
}

Tensors one_copied(ListArgs args) {
  const at::Tensor source = args.inputs.flat[0];
  const at::Tensor result = at::empty_like(source, source.options().device(args.devices[0]));
  args.inputs.flat = {result, source};
  args.call = "copy_";
  run_now(copy(std::move(args)));
  return {result};
}

Tensors functional(const Declaration& declaration, ListArgs args) {
  if (declaration.prepare == &copy) return one_copied(std::move(args));
  if (declaration.prepare != &in_place) return run_now(declaration.prepare(std::move(args)));
  switch (args.collective) {
    case Collective::all_reduce:
      return all_reduced(std::move(args));
    case Collective::reduce:
      return reduced(std::move(args));
    default:
      return broadcasted(std::move(args));
  }
}

// The kernel of an operator, for every device. A build without CUDA refuses CUDA tensors in it.
class Kernel final : public c10::OperatorKernel {
 public:
  Kernel(const Declaration& declaration, const Operator& op)
      : declaration_(declaration), form_(op.form), parameters_(op.parameters) {}

  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) const {
    ListArgs args = declaration_.args();
    const auto values = torch::jit::last(*stack, parameters_.size());
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      parameters_[i]->from_stack(args, values[i]);
    if (form_ != Form::functional) {
      run_now(declaration_.prepare(std::move(args)));
      torch::jit::drop(*stack, parameters_.size());
      return;
    }
    Tensors results = functional(declaration_, std::move(args));
    torch::jit::drop(*stack, parameters_.size());  // the arguments had views of its strings
    if (declaration_.has_one_result())
      torch::jit::push(*stack, std::move(results[0]));
    else
      torch::jit::push(*stack, std::move(results));
  }

 private:
  const Declaration& declaration_;
  const Form form_;
  const std::vector<const Parameter*> parameters_;
};

void register_kernels(torch::Library& m) {
  for (const Declaration& declaration : declarations())
    for (const Operator& op : operators_of(declaration))
      m.impl(op.name.c_str(),
             torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(declaration, op)));
}

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

TORCH_LIBRARY(pycollect, m) {
  for (const Declaration& declaration : declarations())
    for (const Operator& op : operators_of(declaration)) m.def(op.schema.c_str());
}

TORCH_LIBRARY_IMPL(pycollect, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(pycollect, CUDA, m) { register_kernels(m); }

TORCH_LIBRARY_IMPL(pycollect, Autograd, m) {
  for (const Declaration& declaration : declarations())
    for (const Operator& op : operators_of(declaration))
      if (op.form != Form::functional)
        m.impl(op.name.c_str(), torch::CppFunction::makeFromBoxedFunction<&refuse_tracked>());
}

}  // namespace pycollect::ops
