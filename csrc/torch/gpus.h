// Functions that need GPUs. cuda/gpus.cpp and cuda/memory_reach.cpp implement them in builds with
// CUDA, and no_cuda.cpp in all others, so that callers do not depend on the kind of build.
#pragma once
#include <memory>
#include <string>

#include "prepared_call.h"
#include "work.h"

namespace pycollect {

using DeviceList = std::vector<at::Device>;

bool has_cuda();
bool supports(const at::Device& device);

// Returns how ranks on these devices reach each other's memory. Without `peer_access` no GPU
// reaches another GPU's memory.
Topology topology_of(const DeviceList& devices, bool peer_access);

// Returns the compiled plan for ranks on these devices, with copies through the host between those
// that do not reach each other's memory.
std::shared_ptr<const CompiledPlan> compiled_for(const Choice& choice, const SelectionKey& key,
                                                 Rank root, const DeviceList& devices,
                                                 bool peer_access);

// Allocate bytes on a GPU, or in pinned host memory for copies from and to a GPU. Memory that is
// allocated while the device's current stream is being captured belongs to the graph.
at::Tensor new_bytes_on_gpu(int64_t bytes, at::Device device);
at::Tensor new_pinned_bytes(int64_t bytes, at::Device device);

// Returns true if the address is in pageable host memory. Not defined for memory of zero bytes.
bool is_pageable(const void* address);

// Peer access of a pair of GPUs, as the driver reports it and as the test found it.
struct PeerReport {
  static constexpr int kUnknownRank = -1;
  bool reported = false;    // the driver reports peer access
  std::string defect = {};  // why the test failed; empty if it passed, or was not needed
  int performance_rank = kUnknownRank;  // CUDA's rank of the link's speed; 0 is the fastest
};
PeerReport report_peer_access(int from, int to);

// Enqueues a call with at least one rank on a GPU on the ranks' streams, after earlier work on them
// and before later work.
void run_on_gpus(const PreparedCall& prepared);

// Like run_on_gpus(), but on side streams: the callers' streams wait for the call only in wait() of
// the returned work.
std::shared_ptr<Work> enqueue_on_gpus(PreparedCall prepared);

}  // namespace pycollect
