// Implements gpus.h in a build without CUDA. check_tensor() refuses tensors on a GPU, so the
// functions for GPUs are never called, and throw.
#include <stdexcept>

#include "c10d/staging/torch_runtime.h"
#include "gpus.h"
#include "profiler_range.h"

namespace pycollect {

bool has_cuda() { return false; }
bool supports(const at::Device& device) { return device.is_cpu(); }

namespace {
[[noreturn]] void no_cuda() { throw std::logic_error("this build has no CUDA part"); }
}  // namespace

Topology topology_of(const DeviceList&, bool) { return Topology::shared; }
std::shared_ptr<const CompiledPlan> compiled_for(const Choice&, const SelectionKey&, Rank,
                                                 const DeviceList&, bool) {
  no_cuda();
}
at::Tensor new_bytes_on_gpu(int64_t, at::Device) { no_cuda(); }
at::Tensor new_pinned_bytes(int64_t, at::Device) { no_cuda(); }
bool is_pageable(const void*) { no_cuda(); }
PeerReport report_peer_access(int, int) { return {}; }
void begin_range(const char*) {}
void end_range() {}
void run_on_gpus(const PreparedCall&) { no_cuda(); }
std::shared_ptr<Work> enqueue_on_gpus(PreparedCall) { no_cuda(); }

std::shared_ptr<dist::TorchRuntime> dist::torch_runtime() { return nullptr; }

}  // namespace pycollect
