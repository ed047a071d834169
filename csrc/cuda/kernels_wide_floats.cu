// Fold kernels for fp64 and fp32, for the parts of complex numbers, and for complex products.
#include "kernels.cuh"

namespace pycollect::cuda {

template KernelPair fold_kernel<double, Avg>();
template KernelPair fold_kernel<double, Prod>();
template KernelPair fold_kernel<double, Min>();
template KernelPair fold_kernel<double, Max>();
template KernelPair fold_kernel<float, Avg>();
template KernelPair fold_kernel<float, Prod>();
template KernelPair fold_kernel<float, Min>();
template KernelPair fold_kernel<float, Max>();
template KernelPair fold_kernel<Complex<float>, Prod>();
template KernelPair fold_kernel<Complex<double>, Prod>();

}  // namespace pycollect::cuda
