// Host declarations of the kernels. Each is compiled once, in one of kernels_*.cu.
#pragma once

namespace pycollect::cuda {

// Kernels that take KernelArgs. `T` and `Op` are those of a KernelType, where Avg also stands for
// Sum. Linking fails without an instantiation in kernels_*.cu.
template <class T, class Op>
const void* fold_kernel();
const void* copy_kernel();

}  // namespace pycollect::cuda
