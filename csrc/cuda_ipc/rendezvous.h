// GPU rendezvous at the group's first call with tensors on GPUs: sets up CUDA IPC between the ranks
// and self-tests it, with a real write, read and wait between every pair. After each step every
// rank reads the result of all ranks, so all get the same result whichever rank fails.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "communicator.h"

namespace pycollect::cuda_ipc {

struct CudaIpcSetup {
  std::shared_ptr<ipc::Group> group;
  std::shared_ptr<CudaIpcMemory> gpu;
  std::shared_ptr<SymmetricMemory> symmetric_memory;  // of the same group
  Stream stream;             // the group's own, on the device for this rank's staging buffer
  std::size_t buffer_bytes;  // equal on all ranks
};

// Result of the rendezvous. `communicator` is null if CUDA IPC does not work; `why` then has the
// reason of each rank that failed.
struct CudaIpcResult {
  std::shared_ptr<CudaIpcCommunicator> communicator = {};
  std::string why = {};
};

// Runs the rendezvous, with the same result on all ranks. Throws PeerLost and Timeout as Group
// does.
CudaIpcResult rendezvous(const CudaIpcSetup& setup, const ipc::OpContext& context);

}  // namespace pycollect::cuda_ipc
