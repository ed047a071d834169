// The answers of a build without CUDA. Tensors on a GPU are refused with the other arguments, so
// nothing else is ever asked.
#include <stdexcept>

#include "c10d/staging/torch_runtime.h"
#include "gpus.h"
#include "profiler_range.h"

namespace pycollect {

bool has_cuda() { return false; }
bool serves(const at::Device& device) { return device.is_cpu(); }

namespace {
[[noreturn]] void never() { throw std::logic_error("this build has no CUDA part"); }
}  // namespace

Topology topology_of(const DeviceList&, bool) { return Topology::shared; }
std::shared_ptr<const Compiled> compiled_for(const Choice&, const CallKey&, Rank, const DeviceList&,
                                             bool) {
  never();
}
at::Tensor new_bytes_on_gpu(int64_t, at::Device) { never(); }
at::Tensor new_pinned_bytes(int64_t, at::Device) { never(); }
bool is_pageable(const void*) { never(); }
PeerReport report_peer_access(int, int) { return {}; }
void begin_range(const char*) {}
void end_range() {}
void run_on_gpus(const PreparedCall&) { never(); }
std::shared_ptr<Work> enqueue_on_gpus(PreparedCall) { never(); }

std::shared_ptr<dist::TorchRuntime> dist::torch_runtime() { return nullptr; }

}  // namespace pycollect
