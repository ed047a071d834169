// Host declarations of the kernels. Each is compiled once, in one of level_*.cu.
#pragma once

namespace pycollect::cuda {

struct KernelPair {
  const void *small = nullptr, *large = nullptr;  // for SmallTable and LargeTable
};

// `T` and `Op` are those of a KernelType. Without an instantiation in level_*.cu, linking fails.
template <class T, class Op>
KernelPair fold_kernel();
KernelPair copy_kernel();

}  // namespace pycollect::cuda
