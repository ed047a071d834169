// Folds of fp64 and fp32, and of the parts of complex numbers.
#include "level.cuh"

namespace pycollect::cuda {

template Kernel fold_kernel<double, Avg>();
template Kernel fold_kernel<double, Prod>();
template Kernel fold_kernel<double, Min>();
template Kernel fold_kernel<double, Max>();
template Kernel fold_kernel<float, Avg>();
template Kernel fold_kernel<float, Prod>();
template Kernel fold_kernel<float, Min>();
template Kernel fold_kernel<float, Max>();
template Kernel fold_kernel<Complex<float>, Prod>();
template Kernel fold_kernel<Complex<double>, Prod>();

}  // namespace pycollect::cuda
