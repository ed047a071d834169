// Folds of fp16 and bf16.
#include "level.cuh"

namespace pycollect::cuda {

template Kernel fold_kernel<Half, Avg>();
template Kernel fold_kernel<Half, Prod>();
template Kernel fold_kernel<Half, Min>();
template Kernel fold_kernel<Half, Max>();
template Kernel fold_kernel<BFloat16, Avg>();
template Kernel fold_kernel<BFloat16, Prod>();
template Kernel fold_kernel<BFloat16, Min>();
template Kernel fold_kernel<BFloat16, Max>();

}  // namespace pycollect::cuda
