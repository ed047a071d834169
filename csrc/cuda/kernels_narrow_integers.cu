// Fold kernels for integers of one and two bytes. A product has the same bits for signed and
// unsigned types, so products have kernels for unsigned types only.
#include "kernels.cuh"

namespace pycollect::cuda {

template const void* fold_kernel<int8_t, Avg>();
template const void* fold_kernel<int8_t, Min>();
template const void* fold_kernel<int8_t, Max>();
template const void* fold_kernel<uint8_t, Avg>();
template const void* fold_kernel<uint8_t, Min>();
template const void* fold_kernel<uint8_t, Max>();
template const void* fold_kernel<int16_t, Avg>();
template const void* fold_kernel<int16_t, Min>();
template const void* fold_kernel<int16_t, Max>();
template const void* fold_kernel<uint8_t, Prod>();
template const void* fold_kernel<uint16_t, Prod>();

}  // namespace pycollect::cuda
