// Fold kernels for fp16 and bf16.
#include "kernels.cuh"

namespace pycollect::cuda {

template KernelPair fold_kernel<Half, Avg>();
template KernelPair fold_kernel<Half, Prod>();
template KernelPair fold_kernel<Half, Min>();
template KernelPair fold_kernel<Half, Max>();
template KernelPair fold_kernel<BFloat16, Avg>();
template KernelPair fold_kernel<BFloat16, Prod>();
template KernelPair fold_kernel<BFloat16, Min>();
template KernelPair fold_kernel<BFloat16, Max>();

}  // namespace pycollect::cuda
