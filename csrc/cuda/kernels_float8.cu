// Fold kernels for fp8 with three and with two bits of mantissa.
#include "kernels.cuh"

namespace pycollect::cuda {

template FoldKernels fold_kernels<Float8E4M3>();
template FoldKernels fold_kernels<Float8E5M2>();

}  // namespace pycollect::cuda
