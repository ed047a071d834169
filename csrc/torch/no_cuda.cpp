// The answers of a build without CUDA. Tensors on a GPU are refused with the other arguments, so
// nothing else is ever asked.
#include <stdexcept>

#include "c10d/devices/torch_runtime.h"
#include "gpus.h"
#include "profiled.h"

namespace pycollect {

bool has_cuda() { return false; }
bool serves(const at::Device& device) { return device.is_cpu(); }

namespace {
[[noreturn]] void never() { throw std::logic_error("this build has no CUDA part"); }
}  // namespace

Ground ground_of(const std::vector<at::Device>&) { return Ground::shared; }
std::shared_ptr<const Compiled> compiled_for(const Choice&, const Situation&, Rank,
                                             const std::vector<at::Device>&) {
  never();
}
at::Tensor new_bytes_on_gpu(int64_t, at::Device) { never(); }
at::Tensor new_pinned_bytes(int64_t, at::Device) { never(); }
bool is_pageable(const void*) { never(); }
bool stage_all(bool) { return false; }
PeerReport peer_access(int, int) { return {}; }
void begin_range(const char*) {}
void end_range() {}
void run_on_gpus(const Job&) { never(); }
std::shared_ptr<Work> enqueue_on_gpus(Job) { never(); }

std::shared_ptr<dist::TorchRuntime> dist::torch_runtime() { return nullptr; }

}  // namespace pycollect
