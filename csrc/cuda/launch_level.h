// Launches kernels on the current device. Includes no CUDA headers: the stream is opaque.
#pragma once
#include "split_launch.h"

namespace pycollect::cuda {

// Launches the kernels for all works of `launch` on a stream of the current device, which has this
// number of multiprocessors. Allocates
// nothing and waits for nothing, so it can be captured.
void launch_level(Stream stream, const Launch& launch, int multiprocessors);

// Loads on the current device the kernels of all launches with this type and op.
void load_kernels(DType dtype, ReduceOp op);

}  // namespace pycollect::cuda
