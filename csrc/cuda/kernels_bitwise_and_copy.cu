// Kernels that work on bytes: bitwise operations, bools and copies.
#include "copy_kernel.h"
#include "kernels.cuh"

namespace pycollect::cuda {

PYCOLLECT_FOLD(uint8_t, BitAnd)
PYCOLLECT_FOLD(uint8_t, BitOr)
PYCOLLECT_FOLD(uint8_t, BitXor)
PYCOLLECT_FOLD(Bool, BitAnd)
PYCOLLECT_FOLD(Bool, BitOr)
PYCOLLECT_FOLD(Bool, BitXor)

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    copy_level(const __grid_constant__ KernelArgs args) {
  run_copies(args.head, args.words, {blockIdx.x, gridDim.x, threadIdx.x}, GpuAccessor());
}

const void* copy_kernel() { return reinterpret_cast<const void*>(&copy_level); }

}  // namespace pycollect::cuda
