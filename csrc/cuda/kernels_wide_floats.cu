// Fold kernels for fp64 and fp32, for the parts of complex numbers, and for complex products.
#include "kernels.cuh"

namespace pycollect::cuda {

template FoldKernels fold_kernels<double>();
template FoldKernels fold_kernels<float>();
template FoldKernels fold_kernels<Complex<float>>();
template FoldKernels fold_kernels<Complex<double>>();

}  // namespace pycollect::cuda
