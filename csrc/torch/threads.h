// torch's threads, for the executors and for copies, and their replacement in a forked child.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>

#include "../cpu/executor.h"
#include "../cuda/api.h"

namespace pycollect {

// Returns a parallel_for on torch.get_num_threads() threads at most. It is at::parallel_for, except
// in a forked child: there the threads of torch's pool do not exist, waiting for them would never
// end, and each call starts new threads.
const cpu::ParallelFor& threads();

// Calls `run`, which calls torch's operators on tensors. In a forked child it runs in a new thread,
// for the same reason as in threads(). Bypasses autograd and version counters, so that inference
// tensors can be used on any thread.
void run_operators(const std::function<void()>& run);
// Returns a view whose dtype torch can copy: torch copies int4 not at all, and float4_e2m1fn_x2 not
// between all layouts.
at::Tensor copyable(const at::Tensor& tensor);
// Copies with torch between tensors of one dtype and different layouts, or from a narrow float to
// its accumulator.
void copy_strided(const at::Tensor& dst, const at::Tensor& src);
// Copies a rectangle from host memory to host memory; returns when the copy is done.
void copy_on_host(const cuda::CopyRect& rectangle);

}  // namespace pycollect
