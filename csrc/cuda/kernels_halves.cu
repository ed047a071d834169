// Fold kernels for fp16 and bf16.
#include "kernels.cuh"

namespace pycollect::cuda {

template FoldKernels fold_kernels<Half>();
template FoldKernels fold_kernels<BFloat16>();

}  // namespace pycollect::cuda
