// Fold kernels for integers of four and eight bytes.
#include "kernels.cuh"

namespace pycollect::cuda {

template FoldKernels fold_kernels<int32_t>();
template FoldKernels fold_kernels<int64_t>();
template FoldKernels fold_kernels<uint32_t>();
template FoldKernels fold_kernels<uint64_t>();

}  // namespace pycollect::cuda
