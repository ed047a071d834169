// Fold kernels for fp16 and bf16.
#include "kernels.cuh"

namespace pycollect::cuda {

template const void* fold_kernel<Half, Avg>();
template const void* fold_kernel<Half, Prod>();
template const void* fold_kernel<Half, Min>();
template const void* fold_kernel<Half, Max>();
template const void* fold_kernel<BFloat16, Avg>();
template const void* fold_kernel<BFloat16, Prod>();
template const void* fold_kernel<BFloat16, Min>();
template const void* fold_kernel<BFloat16, Max>();

}  // namespace pycollect::cuda
