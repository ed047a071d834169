// Folds of integers of one and two bytes; a product does not know signs.
#include "level.cuh"

namespace pycollect::cuda {

template Kernel fold_kernel<int8_t, Avg>();
template Kernel fold_kernel<int8_t, Min>();
template Kernel fold_kernel<int8_t, Max>();
template Kernel fold_kernel<uint8_t, Avg>();
template Kernel fold_kernel<uint8_t, Min>();
template Kernel fold_kernel<uint8_t, Max>();
template Kernel fold_kernel<int16_t, Avg>();
template Kernel fold_kernel<int16_t, Min>();
template Kernel fold_kernel<int16_t, Max>();
template Kernel fold_kernel<uint8_t, Prod>();
template Kernel fold_kernel<uint16_t, Prod>();

}  // namespace pycollect::cuda
