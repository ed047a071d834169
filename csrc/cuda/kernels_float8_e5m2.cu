// Fold kernels for fp8 with two bits of mantissa.
#include "kernels.cuh"

namespace pycollect::cuda {

template const void* fold_kernel<Float8E5M2, Avg>();
template const void* fold_kernel<Float8E5M2, Prod>();
template const void* fold_kernel<Float8E5M2, Min>();
template const void* fold_kernel<Float8E5M2, Max>();

}  // namespace pycollect::cuda
