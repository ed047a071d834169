// The types of GPUs that list calls support, their memory, and which of it they reach. A build with
// CUDA supports torch's CUDA devices; tests add an emulated one.
#pragma once
#include <c10/util/FunctionRef.h>

#include <memory>
#include <string>

#include "gpu_calls.h"

namespace pycollect {

bool has_cuda();
bool supports(const at::Device& device);

// Returns the calls on a type of device, which must be supported.
GpuCalls& gpu_calls(c10::DeviceType type);
// Adds a type of device, or removes it if `runtime` is null. For tests, before the first call.
void set_runtime(c10::DeviceType type, std::shared_ptr<TorchRuntime> runtime);

// Returns how ranks on these devices reach each other's memory. Without `peer_access` no GPU
// reaches another GPU's memory.
Topology topology_of(const DeviceList& devices, bool peer_access);

// Returns what their plans must know if the topology is Topology::staged.
MemoryReach memory_reach_of(const DeviceList& devices, bool peer_access);

// Calls `act` with the stream that the caller named for the rank as the current one; with the
// current streams as they are if there is none. Memory that `act` allocates is then ordered with
// the rank's stream.
void on_stream_of(const Streams& streams, Rank rank, c10::function_ref<void()> act);

// Allocate bytes on a GPU, for its current stream, or in pinned host memory for copies from and to
// a GPU.
at::Tensor new_bytes_on_gpu(int64_t bytes, at::Device device);
at::Tensor new_pinned_bytes(int64_t bytes, at::Device device);

// Peer access of a pair of GPUs, as the driver reports it and as the test found it.
struct PeerReport {
  static constexpr int kUnknownRank = -1;
  bool reported = false;    // the driver reports peer access
  std::string defect = {};  // why the test failed; empty if it passed, or was not needed
  int performance_rank = kUnknownRank;  // CUDA's rank of the link's speed; 0 is the fastest
};
PeerReport report_peer_access(int from, int to);

}  // namespace pycollect
