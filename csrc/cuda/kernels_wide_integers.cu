// Fold kernels for integers of four and eight bytes. A product has the same bits for signed and
// unsigned types, so products have kernels for unsigned types only.
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
