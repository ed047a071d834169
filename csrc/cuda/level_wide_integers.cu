// Folds of integers of four and eight bytes; a product does not know signs.
#include "level.cuh"

namespace pycollect::cuda {

template Kernel fold_kernel<int32_t, Avg>();
template Kernel fold_kernel<int32_t, Min>();
template Kernel fold_kernel<int32_t, Max>();
template Kernel fold_kernel<int64_t, Avg>();
template Kernel fold_kernel<int64_t, Min>();
template Kernel fold_kernel<int64_t, Max>();
template Kernel fold_kernel<uint32_t, Prod>();
template Kernel fold_kernel<uint64_t, Prod>();

}  // namespace pycollect::cuda
