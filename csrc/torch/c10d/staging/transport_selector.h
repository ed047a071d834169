// Transport selection for device tensors, fastest first: stream-ordered CUDA IPC, or host staging,
// which works wherever CUDA does. All ranks select one together before their first collective of
// device tensors.
// PYCOLLECT_CUDA_TRANSPORT requests one, which then must work.
#pragma once
#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <string>

#include "../../../cuda_ipc/rendezvous.h"
#include "../../../cuda_ipc/symmetric_memory.h"
#include "../../arguments.h"
#include "tensor_staging.h"

namespace pycollect::dist {

// Stages tensors in pinned memory around the host executor (host_staging.cpp).
std::shared_ptr<TensorStaging> stage_through_host(std::shared_ptr<DeviceOps> devices);
// Uses the CUDA IPC staging buffers of the group's GPUs, without the host (cuda_ipc_staging.cpp).
std::shared_ptr<TensorStaging> stage_through_cuda_ipc(
    std::shared_ptr<DeviceOps> devices,
    std::shared_ptr<cuda_ipc::CudaIpcCommunicator> communicator);

inline constexpr const char* kAutoTransport = "auto";
std::vector<const char*> transport_names();
// Accepts kAutoTransport or a transport's name, else throws std::invalid_argument, which lists
// them.
void check_transport(const std::string& name);

class TransportSelector {
 public:
  struct TransportSettings {
    std::string transport;
    std::size_t buffer_bytes;  // of one staging buffer
  };
  // Call before the first collective of a group whose ranks are on several hosts, which reach each
  // other through host staging only.
  void use_host_staging();
  TransportSelector(std::shared_ptr<DeviceOps> devices, TransportSettings settings);

  // Call once, as soon as the group exists: it can then allocate symmetric GPU memory.
  void attach(const ipc::Group& group);
  // Null: this build has no CUDA part.
  const std::shared_ptr<cuda_ipc::SymmetricMemory>& symmetric_memory() const {
    return symmetric_memory_;
  }
  // Returns whether tensors on `device` are allocated in symmetric memory.
  bool serves_symmetric(at::Device device) const {
    return symmetric_memory_ && (device.is_cuda() || devices_->has(device));
  }
  // Returns `count` elements of symmetric memory. Throws std::invalid_argument if there is no such
  // memory, or under stream capture.
  at::Tensor empty(at::Device device, int64_t count, at::ScalarType type);
  // Returns the used and cached bytes of symmetric memory; none if this build has no CUDA part. May
  // wait for a device.
  std::optional<cuda_ipc::SymmetricMemory::SymmetricUsage> usage();
  // Returns whether symmetric memory is expected to help tensors on `device`.
  bool benefits_from_symmetric_memory(at::Device device);

  // Returns whether the GPU rendezvous must still precede the first collective of device tensors.
  bool needs_rendezvous();
  // Runs the GPU rendezvous with all ranks, and selects the transport. Throws what
  // cuda_ipc::rendezvous throws.
  void rendezvous(const std::shared_ptr<ipc::Group>& group, at::Device device,
                  const ipc::OpContext& context);
  // Returns the staging of one collective of device tensors. Throws CollectiveError, on all ranks
  // alike, if the requested transport does not work.
  std::shared_ptr<TensorStaging> begin();
  const std::shared_ptr<DeviceOps>& devices() const { return devices_; }
  // Frees device resources, after pending device work had time until the deadline to finish.
  // Returns the first device error that was reported to no caller.
  std::exception_ptr close(ipc::Deadline deadline);
  // Call after close(): unmaps the peers' symmetric memory and frees that of this rank.
  void leave();

 private:
  void free_returned();  // frees tensors that calls which have ended kept for their peers

  const std::shared_ptr<DeviceOps> devices_;
  const TransportSettings settings_;
  std::shared_ptr<cuda_ipc::SymmetricMemory> symmetric_memory_;
  std::mutex closing_;                  // makes a second close() wait for the first one
  std::atomic<bool> abandoned_{false};  // by close(): a stream does not end
  std::mutex mutex_;                    // guards the members below
  bool rendezvous_done_ = false, logged_ = false;
  std::string failed_;  // error if the requested transport does not work
  std::shared_ptr<cuda_ipc::CudaIpcCommunicator> communicator_;  // null: host staging
};

// Throws if a current stream of the calling thread, which has to wait for the results, is under
// capture.
void check_no_capture(const TensorStaging& staging, const char* operation);

}  // namespace pycollect::dist
