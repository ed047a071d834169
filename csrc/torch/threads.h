// torch's own threads, handed to the executors; and what becomes of them in a forked child.
#pragma once
#include "../cpu/executor.h"

namespace pycollect {

// at::parallel_for, as many threads as torch.get_num_threads(). A child that was forked has lost
// the pool it inherited and would wait for it for ever, so there the work runs on threads of its
// own.
const cpu::ParallelFor& threads();

// Is this a forked child?
bool forked();

}  // namespace pycollect
