// torch's own threads, handed to the executors; and what becomes of them in a forked child.
#pragma once
#include <ATen/core/Tensor.h>

#include "../cpu/executor.h"

namespace pycollect {

// at::parallel_for, as many threads as torch.get_num_threads(). A child that was forked has lost
// the pool it inherited and would wait for it for ever, so there the work runs on threads of its
// own.
const cpu::ParallelFor& threads();

// torch's own copy between unlike layouts, kept to one thread in a forked child for the same
// reason.
void copy_strided(const at::Tensor& dst, const at::Tensor& src);

}  // namespace pycollect
