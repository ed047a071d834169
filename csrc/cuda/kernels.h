// Host declarations of the kernels. Each is compiled once, in one of kernels_*.cu.
#pragma once

namespace pycollect::cuda {

struct KernelPair {
  const void *small = nullptr, *large = nullptr;  // for SmallKernelArgs and LargeKernelArgs
};

// `T` and `Op` are those of a KernelType, where Avg also stands for Sum. Linking fails without an
// instantiation in kernels_*.cu.
template <class T, class Op>
KernelPair fold_kernel();
KernelPair copy_kernel();

}  // namespace pycollect::cuda
