// Splits the works of a launch into kernel launches, and decides which blocks run a work and how
// wide its accesses are. Allocates no device memory and does not call CUDA.
#pragma once
#include <functional>

#include "api.h"
#include "kernel_args.h"

namespace pycollect::cuda {

struct DeviceLimits {
  int multiprocessors;
  std::size_t args_bytes = sizeof(LargeKernelArgs);
};

enum class KernelKind { fold, copy };
struct KernelLaunch {
  KernelKind kind;
  const LargeKernelArgs& args;
  std::size_t bytes;  // used bytes of the arguments
  uint32_t blocks;
};

// Calls `issue` for each kernel launch, in order. Throws TypeError for a reduction that is not
// defined for the type, and ValueError for memory that is not aligned for the type and for a fold
// of more sources than fit in a kernel's arguments (about 4,000, or 500 with drivers before CUDA
// 12.1; half as many in a work of several lines).
void split_launch(const Launch& launch, const DeviceLimits& limits,
                  const std::function<void(const KernelLaunch&)>& issue);

}  // namespace pycollect::cuda
