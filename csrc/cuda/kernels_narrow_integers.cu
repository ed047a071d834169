// Folds of integers of one and two bytes. Products are the same for signed and unsigned types.
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
