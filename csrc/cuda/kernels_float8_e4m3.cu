// Fold kernels for fp8 with three bits of mantissa.
#include "kernels.cuh"

namespace pycollect::cuda {

template KernelPair fold_kernel<Float8E4M3, Avg>();
template KernelPair fold_kernel<Float8E4M3, Prod>();
template KernelPair fold_kernel<Float8E4M3, Min>();
template KernelPair fold_kernel<Float8E4M3, Max>();

}  // namespace pycollect::cuda
