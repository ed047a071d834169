// Replaces csrc/torch/cuda in a build without CUDA. check_tensor() refuses tensors on a GPU there.
#include "gpus.h"
#include "profiler.h"

namespace pycollect {

std::shared_ptr<TorchRuntime> torch_runtime() { return nullptr; }
PeerReport report_peer_access(int, int) { return {}; }
void begin_range(const char*) {}
void end_range() {}

}  // namespace pycollect
