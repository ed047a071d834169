// Fold kernels for integers of one and two bytes; those of uint8 compute all bitwise reductions.
#include "kernels.cuh"

namespace pycollect::cuda {

template FoldKernels fold_kernels<int8_t>();
template FoldKernels fold_kernels<uint8_t>();
template FoldKernels fold_kernels<int16_t>();
template FoldKernels fold_kernels<uint16_t>();

}  // namespace pycollect::cuda
