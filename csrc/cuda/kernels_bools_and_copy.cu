// Fold kernels for bools, and the kernel that copies.
#include "copy_kernel.h"
#include "kernels.cuh"

namespace pycollect::cuda {

template FoldKernels fold_kernels<Bool>();

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    copy_level(const __grid_constant__ KernelArgs args) {
  run_copies(args.head, args.words, {blockIdx.x, gridDim.x, threadIdx.x}, GpuAccessor());
}

const void* copy_kernel() { return reinterpret_cast<const void*>(&copy_level); }

}  // namespace pycollect::cuda
