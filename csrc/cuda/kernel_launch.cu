// See kernel_launch.h. The kernel is looked up by dtype and op in a KernelTable.
#include "check.h"
#include "kernel_launch.h"
#include "kernels.h"

namespace pycollect::cuda {
namespace {

const void* find_kernel(KernelKind kind, DType dtype, ReduceOp op) {
  if (kind == KernelKind::copy) return copy_kernel();
  struct ForReduction {
    const void *rank_order, *tree_order, *widening;
  };
  static const auto folds = kernel_table<ForReduction>([](auto kernel) -> ForReduction {
    using K = decltype(kernel);
    const FoldKernels all = fold_kernels<typename K::Type>();
    const unsigned i = index_of<typename K::Operation>(ReduceOps{});
    return {all.rank_order[i], all.tree_order[i],
            std::is_same_v<typename K::Operation, Avg> ? all.widening_sum : nullptr};
  });
  const ForReduction& found = folds[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)];
  return kind == KernelKind::fold        ? found.rank_order
         : kind == KernelKind::tree_fold ? found.tree_order
                                         : found.widening;
}

}  // namespace

// CUDA loads a kernel when its attributes are asked for.
void load_kernels(DType dtype, ReduceOp op) {
  for (const KernelKind kind : kKernelKinds) {
    cudaFuncAttributes attributes = {};
    if (const void* const kernel = find_kernel(kind, dtype, op))
      check(cudaFuncGetAttributes(&attributes, kernel));
  }
}

void launch_level(Stream stream, const Launch& launch, int multiprocessors) {
  split_launch(launch, multiprocessors, [&](const KernelLaunch& kernel_launch) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(kernel_launch.blocks);
    config.blockDim = dim3(kThreads);
    config.stream = static_cast<cudaStream_t>(stream.handle);
    // CUDA reads the arguments before the call returns, and never writes them.
    void* parameters[] = {const_cast<KernelArgs*>(&kernel_launch.args)};
    check(cudaLaunchKernelExC(&config, find_kernel(kernel_launch.kind, launch.dtype, launch.op),
                              parameters));
  });
}

}  // namespace pycollect::cuda
