// Host declarations of the kernels. Each is compiled once, in one of kernels_*.cu.
#pragma once
#include "../plan/dtype.h"

namespace pycollect::cuda {

// Kernels that take KernelArgs, by op; null where no dtype computes in `T` with it. `T` and the op
// are those of a KernelType, where `avg` also stands for `sum`. Linking fails without an
// instantiation in kernels_*.cu.
struct FoldKernels {
  using ByOp = std::array<const void*, ReduceOps::size>;
  ByOp rank_order, tree_order;    // the latter null where the order changes no bits
  const void* widening_sum = {};  // in tree order, of narrow types
};
template <class T>
FoldKernels fold_kernels();
const void* copy_kernel();

}  // namespace pycollect::cuda
