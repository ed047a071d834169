// See launch_level.h. The kernel is looked up by dtype and op in a KernelTable. Small arguments
// have kernels of their own, because a launch copies all of a kernel's parameters.
#include "check.h"
#include "kernel_table.h"
#include "kernels.h"
#include "launch_level.h"

namespace pycollect::cuda {
namespace {

KernelPair find_kernel(KernelKind kind, DType dtype, ReduceOp op) {
  if (kind == KernelKind::copy) return copy_kernel();
  static const auto folds = kernel_table<KernelPair>([](auto kernel) {
    using K = decltype(kernel);
    return fold_kernel<typename K::Type, typename K::Operation>();
  });
  return folds[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)];
}

}  // namespace

// CUDA loads a kernel when its attributes are asked for.
void load_kernels(DType dtype, ReduceOp op) {
  for (const KernelKind kind : {KernelKind::copy, KernelKind::fold}) {
    const KernelPair kernel = find_kernel(kind, dtype, op);
    for (const void* function : {kernel.small, kernel.large}) {
      cudaFuncAttributes attributes = {};
      if (function != nullptr) check(cudaFuncGetAttributes(&attributes, function));
    }
  }
}

void launch_level(Stream stream, const Launch& launch, const DeviceLimits& limits) {
  split_launch(launch, limits, [&](const KernelLaunch& kernel_launch) {
    const KernelPair kernel = find_kernel(kernel_launch.kind, launch.dtype, launch.op);
    const bool small = kernel_launch.bytes <= sizeof(SmallKernelArgs);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(kernel_launch.blocks);
    config.blockDim = dim3(kThreads);
    config.stream = static_cast<cudaStream_t>(stream.handle);
    // CUDA reads the arguments before the call returns, and never writes them.
    void* parameters[] = {const_cast<LargeKernelArgs*>(&kernel_launch.args)};
    check(cudaLaunchKernelExC(&config, small ? kernel.small : kernel.large, parameters));
  });
}

}  // namespace pycollect::cuda
