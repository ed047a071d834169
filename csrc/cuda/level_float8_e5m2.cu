// Folds of fp8 with two bits of mantissa.
#include "level.cuh"

namespace pycollect::cuda {

template Kernel fold_kernel<Float8E5M2, Avg>();
template Kernel fold_kernel<Float8E5M2, Prod>();
template Kernel fold_kernel<Float8E5M2, Min>();
template Kernel fold_kernel<Float8E5M2, Max>();

}  // namespace pycollect::cuda
