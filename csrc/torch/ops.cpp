// Registers the collectives as torch operators, for torch.compile, torch.export and other tracers.
// Their shape functions are in pycollect/_fake_kernels.py.
#include <torch/library.h>

#include "collectives.h"
#include "work.h"

namespace pycollect::ops {
namespace {

using Name = std::optional<std::string_view>;

Tensors run_now(PreparedCall prepared) {
  prepared.commit();
  drain();
  prepared.run();
  return prepared.results;
}

void all_reduce_(at::TensorList tensors, std::string_view op, Name algorithm) {
  const InPlaceArgs args{.collective = Collective::all_reduce,
                         .call = "all_reduce",
                         .op = op_named(op, "all_reduce"),
                         .algorithm = algorithm.value_or("")};
  run_now(in_place(args, {tensors.vec(), static_cast<int>(tensors.size())}));
}

void reduce_(at::TensorList tensors, int64_t dst, std::string_view op, Name algorithm) {
  const InPlaceArgs args{.collective = Collective::reduce,
                         .call = "reduce",
                         .op = op_named(op, "reduce"),
                         .root = dst,
                         .algorithm = algorithm.value_or("")};
  run_now(in_place(args, {tensors.vec(), static_cast<int>(tensors.size())}));
}

void broadcast_(at::TensorList tensors, int64_t src, Name algorithm) {
  const InPlaceArgs args{.collective = Collective::broadcast,
                         .call = "broadcast",
                         .root = src,
                         .root_name = "src",
                         .algorithm = algorithm.value_or("")};
  run_now(in_place(args, {tensors.vec(), static_cast<int>(tensors.size())}));
}

Tensors all_gather(at::TensorList tensors, int64_t dim, Name algorithm) {
  return run_now(block_collective(
      {.collective = Collective::all_gather, .dim = dim, .algorithm = algorithm.value_or("")},
      tensors.vec()));
}

Tensors reduce_scatter(at::TensorList tensors, std::string_view op, int64_t dim, Name algorithm) {
  return run_now(block_collective({.collective = Collective::reduce_scatter,
                                   .op = op_named(op, "reduce_scatter"),
                                   .dim = dim,
                                   .algorithm = algorithm.value_or("")},
                                  tensors.vec()));
}

Tensors all_to_all(at::TensorList tensors, int64_t dim) {
  return run_now(
      block_collective({.collective = Collective::all_to_all, .dim = dim}, tensors.vec()));
}

}  // namespace

TORCH_LIBRARY(pycollect, m) {
  m.def("all_reduce_(Tensor(a!)[] tensors, str op='sum', *, str? algorithm=None) -> ()");
  m.def("reduce_(Tensor(a!)[] tensors, int dst=0, str op='sum', *, str? algorithm=None) -> ()");
  m.def("broadcast_(Tensor(a!)[] tensors, int src=0, *, str? algorithm=None) -> ()");
  m.def("all_gather(Tensor[] tensors, int dim=0, *, str? algorithm=None) -> Tensor[]");
  m.def(
      "reduce_scatter(Tensor[] tensors, str op='sum', int dim=0, *, str? algorithm=None) -> "
      "Tensor[]");
  m.def("all_to_all(Tensor[] tensors, int dim=0) -> Tensor[]");
}

namespace {

void register_kernels(torch::Library& m) {
  m.impl("all_reduce_", &all_reduce_);
  m.impl("reduce_", &reduce_);
  m.impl("broadcast_", &broadcast_);
  m.impl("all_gather", &all_gather);
  m.impl("reduce_scatter", &reduce_scatter);
  m.impl("all_to_all", &all_to_all);
}

}  // namespace

// The same functions serve every device. A build without CUDA refuses CUDA tensors in them.
TORCH_LIBRARY_IMPL(pycollect, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(pycollect, CUDA, m) { register_kernels(m); }

}  // namespace pycollect::ops
