// Fold kernels for integers of one and two bytes. A product has the same bits for signed and
// unsigned types, so products have kernels for unsigned types only.
#include "kernels.cuh"

namespace pycollect::cuda {

template KernelPair fold_kernel<int8_t, Avg>();
template KernelPair fold_kernel<int8_t, Min>();
template KernelPair fold_kernel<int8_t, Max>();
template KernelPair fold_kernel<uint8_t, Avg>();
template KernelPair fold_kernel<uint8_t, Min>();
template KernelPair fold_kernel<uint8_t, Max>();
template KernelPair fold_kernel<int16_t, Avg>();
template KernelPair fold_kernel<int16_t, Min>();
template KernelPair fold_kernel<int16_t, Max>();
template KernelPair fold_kernel<uint8_t, Prod>();
template KernelPair fold_kernel<uint16_t, Prod>();

}  // namespace pycollect::cuda
