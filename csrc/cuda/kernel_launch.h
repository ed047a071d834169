// Launches kernels on the current device. The tasks of a launch are split into kernel launches,
// which decides which blocks run a task and how wide its accesses are; kernel_launch.cu issues
// these. Includes no CUDA headers: the stream is opaque.
#pragma once
#include <array>
#include <functional>

#include "api.h"
#include "kernel_args.h"

namespace pycollect::cuda {

// Folds come before copies, which may read their results. A widening fold writes accumulators, in
// tree order.
enum class KernelKind { fold, tree_fold, widening_fold, copy };
inline constexpr std::array kKernelKinds{KernelKind::fold, KernelKind::tree_fold,
                                         KernelKind::widening_fold, KernelKind::copy};
struct KernelLaunch {
  KernelKind kind;
  const KernelArgs& args;
  std::size_t bytes;  // used bytes of the arguments
  uint32_t blocks;
};

// Returns the number of addresses that fit in a kernel's arguments for one task. `pitched`: of a
// task of several rows, where each address has a pitch.
constexpr std::size_t most_addresses(bool pitched) {
  return (KernelArgs::kWords - kTaskWords) / (pitched ? 2 : 1);
}

// Calls `issue` for each kernel launch on a device, in order. Allocates no device memory and does
// not call CUDA. Throws TypeError for a reduction that is not defined for the type, and ValueError
// for memory that is not aligned for the type and for a fold of as many sources as addresses fit,
// or more.
void split_launch(const Launch& launch, int multiprocessors,
                  const std::function<void(const KernelLaunch&)>& issue);

// Launches the kernels for all tasks of `launch` on a stream of the current device, which has this
// number of multiprocessors. Allocates nothing and waits for nothing, so it can be captured.
void launch_level(Stream stream, const Launch& launch, int multiprocessors);

// Loads on the current device the kernels of all launches with this type and op.
void load_kernels(DType dtype, ReduceOp op);

}  // namespace pycollect::cuda
