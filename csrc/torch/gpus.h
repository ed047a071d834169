// What this room asks of GPUs. cuda/gpus.cpp answers in builds with CUDA, no_cuda.cpp in all
// others, so that no caller has to know which one it is in.
#pragma once
#include <memory>
#include <string>

#include "prepared_call.h"
#include "work.h"

namespace pycollect {

using DeviceList = std::vector<at::Device>;

bool has_cuda();
bool serves(const at::Device& device);

// How ranks on these devices reach each other. Without `peer_access` no GPU reaches another.
Topology topology_of(const DeviceList& devices, bool peer_access);

// The plan for ranks on these devices, with copies through the host where they do not reach each
// other.
std::shared_ptr<const Compiled> compiled_for(const Choice& choice, const CallKey& situation,
                                             Rank root, const DeviceList& devices,
                                             bool peer_access);

// New memory for a rank; `pinned` is the host's, for copies from and to a device. What is made
// while the device's current stream is under capture belongs to the graph.
at::Tensor new_bytes_on_gpu(int64_t bytes, at::Device device);
at::Tensor new_pinned_bytes(int64_t bytes, at::Device device);

// Is this address in host memory that no GPU should touch? Not asked of memory of zero bytes.
bool is_pageable(const void* address);

// What is known of one GPU's access to another's memory.
struct PeerReport {
  static constexpr int kUnknownRank = -1;
  bool asked = false;       // what the driver says
  std::string defect = {};  // what went wrong when it was tried; empty for who need not be
  int rank = kUnknownRank;  // of the link's speed, 0 being the fastest that there is here
};
PeerReport report_peer_access(int from, int to);

// Issues a job with at least one rank on a GPU, behind what is on its streams and before what
// follows.
void run_on_gpus(const PreparedCall& job);

// Like run_on_gpus(), on streams of its own: the callers' streams do not wait for the job until
// wait() of the returned work.
std::shared_ptr<Work> enqueue_on_gpus(PreparedCall job);

}  // namespace pycollect
