// Kernels that work on bytes: bitwise operations, bools and copies.
#include "kernels.cuh"

namespace pycollect::cuda {

template KernelPair fold_kernel<uint8_t, BitAnd>();
template KernelPair fold_kernel<uint8_t, BitOr>();
template KernelPair fold_kernel<uint8_t, BitXor>();
template KernelPair fold_kernel<Bool, BitAnd>();
template KernelPair fold_kernel<Bool, BitOr>();
template KernelPair fold_kernel<Bool, BitXor>();

KernelPair copy_kernel() {
  return {reinterpret_cast<const void*>(&copy_level<SmallKernelArgs>),
          reinterpret_cast<const void*>(&copy_level<LargeKernelArgs>)};
}

}  // namespace pycollect::cuda
