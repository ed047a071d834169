// all_reduce, reduce and broadcast, whose buffers are not cut by ranks, and reduce_scatter.
#include "../../plan/error.h"
#include "builders.h"
#include "reduction.h"
#include "shapes.h"

namespace pycollect::dist {
namespace {

// In place, but for PREMUL_SUM, which takes the products from memory of their own.
struct InPlace {
  Reduction reduction;
  bool reads, writes;  // does this rank's tensor matter, and does it change?
  Rank root = 0;
};

void bind(const InPlace& what, Binder& binder, const at::Tensor& t, const Label& label) {
  const std::size_t request = binder.request(what.reduction.dtype(t, label));
  const bool reads = what.reads && !what.reduction.scales();  // else the products are read
  const shm::Span span = !what.writes ? binder.read(t, label)
                         : reads      ? binder.update(t, label)
                                      : binder.write(t, label);
  if (!what.reduction.scales()) return binder.add_input(request, 0, span);
  binder.add_input(request, 0, binder.compute(t, what.reduction.scaled(t, label)));
  if (what.writes) binder.add_output(request, 0, span);
}

void bind_all(Call& call, Seat seat, const Tensors& tensors, const InPlace& what) {
  require(!tensors.empty(), call.name, ": no tensors were passed; pass at least one");
  const bool apart = what.reduction.scales();
  Binder binder(call, seat,
                {.input_blocks = 1,
                 .output_blocks = apart && what.writes,
                 .op = what.reduction.op(),
                 .root = what.root,
                 .in_place = !apart});
  for (std::size_t i = 0; i < tensors.size(); ++i)
    bind(what, binder, tensors[i], label_of(call, "tensors", tensors, i));
  binder.finish();
  call.results = tensors;
}

}  // namespace

void all_reduce(Call& call, Seat seat, const Tensors& tensors, const c10d::ReduceOp& op) {
  bind_all(call, seat, tensors, {Reduction(op, call.name), true, true});
}

void reduce(Call& call, Seat seat, const Tensors& tensors, const c10d::ReduceOp& op, int64_t root) {
  check_rank(root, seat.world, call.name, "dst");
  bind_all(call, seat, tensors,
           {Reduction(op, call.name), true, seat.rank == root, static_cast<Rank>(root)});
}

void broadcast(Call& call, Seat seat, const Tensors& tensors, int64_t root) {
  check_rank(root, seat.world, call.name, "src");
  const bool sends = seat.rank == root;
  bind_all(call, seat, tensors,
           {Reduction(c10d::ReduceOp::SUM, call.name), sends, !sends, static_cast<Rank>(root)});
}

namespace {

Binder scattering(Call& call, Seat seat, const Reduction& reduction) {
  return {call,
          seat,
          {.input_blocks = static_cast<std::size_t>(seat.world),
           .output_blocks = 1,
           .op = reduction.op()}};
}

}  // namespace

// The result may lie where the own part of the input is.
void reduce_scatter(Call& call, Seat seat, const Tensors& outputs, const TensorLists& inputs,
                    const c10d::ReduceOp& op) {
  const Reduction reduction(op, call.name);
  Binder binder = scattering(call, seat, reduction);
  check_lists(call, seat, outputs, inputs);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const Label output{call.name, "output"};
    const std::size_t request = binder.request(reduction.dtype(outputs[i], output));
    const shm::Span own = binder.write(outputs[i], output);
    binder.add_output(request, 0, own);
    for (Rank r = 0; r < seat.world; ++r) {
      const Label label{call.name, "input_list", r};
      const at::Tensor& input = inputs[i][r];
      check_dtype(input, label, outputs[i], output);
      if (r == seat.rank) check_size(input, label, outputs[i], output);
      const shm::Span span = binder.read_beside(input, label, own);
      binder.add_input(
          request, r,
          reduction.scales() ? binder.compute(input, reduction.scaled(input, label)) : span);
    }
  }
  binder.finish();
  call.results = outputs;
}

void reduce_scatter_single(Call& call, Seat seat, const Tensors& outputs, const Tensors& inputs,
                           const c10d::ReduceOp& op) {
  const Reduction reduction(op, call.name);
  Binder binder = scattering(call, seat, reduction);
  check_pairs(call, outputs, inputs);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const Label output = label_of(call, "output", outputs, i);
    const Label input = label_of(call, "input", inputs, i);
    check_joined(inputs[i], input, outputs[i], output, seat.world);
    const std::size_t request = binder.request(reduction.dtype(outputs[i], output));
    const shm::Span own = binder.write(outputs[i], output);
    binder.add_output(request, 0, own);
    const shm::Span span = binder.read_beside(inputs[i], input, own, seat.rank * own.count);
    binder.add_whole_input(
        request,
        reduction.scales() ? binder.compute(inputs[i], reduction.scaled(inputs[i], input)) : span);
  }
  binder.finish();
  call.results = outputs;
}

}  // namespace pycollect::dist
