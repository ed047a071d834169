// What this room asks of GPUs. cuda/gpus.cpp answers in builds with CUDA, no_cuda.cpp in all
// others, so that no caller has to know which one it is in.
#pragma once
#include <memory>

#include "job.h"
#include "work.h"

namespace pycollect {

bool has_cuda();
bool serves(const at::Device& device);

// Issues a job with at least one rank on a GPU, behind what is on its streams and before what
// follows.
void run_on_gpus(const Job& job);

// The same on streams of its own: what follows on the callers' streams does not wait for it until
// somebody waits for the work.
std::shared_ptr<Work> enqueue_on_gpus(Job job);

}  // namespace pycollect
