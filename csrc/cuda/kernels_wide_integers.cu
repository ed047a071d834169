// Fold kernels for integers of four and eight bytes. A product has the same bits for signed and
// unsigned types, so products have kernels for unsigned types only.
#include "kernels.cuh"

namespace pycollect::cuda {

template const void* fold_kernel<int32_t, Avg>();
template const void* fold_kernel<int32_t, Min>();
template const void* fold_kernel<int32_t, Max>();
template const void* fold_kernel<int64_t, Avg>();
template const void* fold_kernel<int64_t, Min>();
template const void* fold_kernel<int64_t, Max>();
template const void* fold_kernel<uint32_t, Prod>();
template const void* fold_kernel<uint64_t, Prod>();

}  // namespace pycollect::cuda
