// torch's threads, for the executors, and their replacement in a forked child.
#pragma once
#include <ATen/core/Tensor.h>

#include "../cpu/executor.h"

namespace pycollect {

// Returns a parallel_for on torch.get_num_threads() threads at most. It is at::parallel_for, except
// in a forked child: there the threads of torch's pool do not exist, waiting for them would never
// end, and each call starts new threads.
const cpu::ParallelFor& threads();

// Copies with torch between tensors of different layouts. In a forked child the copy runs in a new
// thread, for the same reason as in threads().
void copy_strided(const at::Tensor& dst, const at::Tensor& src);

}  // namespace pycollect
