// Kernels that work on bytes: bitwise operations, bools and copies.
#include "copy_kernel.h"
#include "kernels.cuh"

namespace pycollect::cuda {

template const void* fold_kernel<uint8_t, BitAnd>();
template const void* fold_kernel<uint8_t, BitOr>();
template const void* fold_kernel<uint8_t, BitXor>();
template const void* fold_kernel<Bool, BitAnd>();
template const void* fold_kernel<Bool, BitOr>();
template const void* fold_kernel<Bool, BitXor>();

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    copy_level(const __grid_constant__ KernelArgs args) {
  run_copies(args.head, args.words, {blockIdx.x, gridDim.x, threadIdx.x}, GpuAccessor());
}

const void* copy_kernel() { return reinterpret_cast<const void*>(&copy_level); }

}  // namespace pycollect::cuda
