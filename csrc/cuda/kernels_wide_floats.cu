// Fold kernels for fp64 and fp32, for the parts of complex numbers, and for complex products.
#include "kernels.cuh"

namespace pycollect::cuda {

template const void* fold_kernel<double, Avg>();
template const void* fold_kernel<double, Prod>();
template const void* fold_kernel<double, Min>();
template const void* fold_kernel<double, Max>();
template const void* fold_kernel<float, Avg>();
template const void* fold_kernel<float, Prod>();
template const void* fold_kernel<float, Min>();
template const void* fold_kernel<float, Max>();
template const void* fold_kernel<Complex<float>, Prod>();
template const void* fold_kernel<Complex<double>, Prod>();

}  // namespace pycollect::cuda
