// The answers of a build without CUDA. Tensors on a GPU are refused with the other arguments, so
// nothing else is ever asked.
#include "../plan/error.h"
#include "gpus.h"

namespace pycollect {

bool has_cuda() { return false; }
bool serves(const at::Device& device) { return device.is_cpu(); }

void run_on_gpus(const Job&) { throw std::logic_error("this build has no CUDA part"); }
std::shared_ptr<Work> enqueue_on_gpus(Job) {
  throw std::logic_error("this build has no CUDA part");
}

}  // namespace pycollect
