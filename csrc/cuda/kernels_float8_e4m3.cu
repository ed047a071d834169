// Fold kernels for fp8 with three bits of mantissa.
#include "kernels.cuh"

namespace pycollect::cuda {

template const void* fold_kernel<Float8E4M3, Avg>();
template const void* fold_kernel<Float8E4M3, Prod>();
template const void* fold_kernel<Float8E4M3, Min>();
template const void* fold_kernel<Float8E4M3, Max>();

}  // namespace pycollect::cuda
