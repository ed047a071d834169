// Folds of fp8 with three bits of mantissa.
#include "level.cuh"

namespace pycollect::cuda {

template Kernel fold_kernel<Float8E4M3, Avg>();
template Kernel fold_kernel<Float8E4M3, Prod>();
template Kernel fold_kernel<Float8E4M3, Min>();
template Kernel fold_kernel<Float8E4M3, Max>();

}  // namespace pycollect::cuda
