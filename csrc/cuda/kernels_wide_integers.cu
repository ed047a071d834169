// Folds of integers of four and eight bytes. Products are the same for signed and unsigned types.
#include "kernels.cuh"

namespace pycollect::cuda {

template KernelPair fold_kernel<int32_t, Avg>();
template KernelPair fold_kernel<int32_t, Min>();
template KernelPair fold_kernel<int32_t, Max>();
template KernelPair fold_kernel<int64_t, Avg>();
template KernelPair fold_kernel<int64_t, Min>();
template KernelPair fold_kernel<int64_t, Max>();
template KernelPair fold_kernel<uint32_t, Prod>();
template KernelPair fold_kernel<uint64_t, Prod>();

}  // namespace pycollect::cuda
