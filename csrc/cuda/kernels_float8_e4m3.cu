// Fold kernels for fp8 with three bits of mantissa.
#include "kernels.cuh"

namespace pycollect::cuda {

template FoldKernels fold_kernels<Float8E4M3>();

}  // namespace pycollect::cuda
