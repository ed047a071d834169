// The kernels as the host knows them. Each is compiled once, in one of level_*.cu.
#pragma once

namespace pycollect::cuda {

struct KernelPair {
  const void *small = nullptr, *large = nullptr;  // for either size of table
};

// Of a kernel_type's type and operation; one that no file defines is an undefined symbol.
template <class T, class Op>
KernelPair fold_kernel();
KernelPair copy_kernel();

}  // namespace pycollect::cuda
