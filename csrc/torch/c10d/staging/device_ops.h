// DeviceOps: device operations for the collectives, or the messages, of one group: allocation,
// copies, events, and queries of stream capture. It owns one stream per device, "the group's
// stream". The "current stream" of a device is torch's, for the calling thread: the stream of the
// caller.
#pragma once
#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../../../group/wait.h"
#include "../../torch_runtime.h"

namespace pycollect::dist {

// An event that is recorded once, when it is constructed.
class DeviceEvent {
 public:
  DeviceEvent(std::shared_ptr<TorchRuntime> torch, cuda::Stream stream);
  ~DeviceEvent();
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;

  bool reached() const;  // thread-safe; throws the device's error
  // Makes the calling thread's current stream on `device` wait for the event.
  void block_current(at::Device device) const { block(torch_->current_stream(device)); }
  void block(cuda::Stream stream) const;

 private:
  const std::shared_ptr<TorchRuntime> torch_;
  cuda::Event event_;
};

struct CopyPair {
  // `tensor` is on a device. `dense` has the same size, is contiguous, and is in pinned memory or
  // on the device of the group's stream.
  at::Tensor tensor, dense;
};

// Deadline for device work to end after the calls of a group that is being destroyed by `deadline`:
// the same, because groups that are closed one after another share it, but not at once.
inline ipc::Deadline device_deadline(ipc::Deadline deadline) {
  return std::max(deadline, ipc::Clock::now() + std::chrono::seconds(1));
}

class DeviceOps {
 public:
  // If `torch` is null (a build without CUDA), there are no devices, and serves() is always false.
  explicit DeviceOps(std::shared_ptr<TorchRuntime> torch);
  ~DeviceOps();
  DeviceOps(const DeviceOps&) = delete;
  DeviceOps& operator=(const DeviceOps&) = delete;
  // Returns operations on the same devices, with other streams as the group's streams.
  std::shared_ptr<DeviceOps> with_own_streams() const {
    return std::make_shared<DeviceOps>(torch_);
  }

  TorchRuntime& torch() const { return *torch_; }  // for tensors that these operations serve
  // Returns whether the tensor is on a device that these operations support.
  bool serves(const at::Tensor& tensor) const { return torch_ && torch_->serves(tensor); }
  bool has(at::Device device) const { return torch_ && torch_->has(device); }
  bool is_capturing(at::Device device);  // whether its current stream is under capture

  // Returns contiguous pinned host memory of the same size. Thread-safe.
  at::Tensor new_pinned(const at::Tensor& like);
  std::unique_ptr<DeviceEvent> record_event(at::Device device);  // on its current stream
  // Makes the group's stream on `device` wait for `after`. Callers enqueue no work on the group's
  // stream and do not capture it.
  void wait_for(at::Device device, const DeviceEvent& after) { after.block(stream(device)); }
  // Enqueues the copies of `dense` to `tensor` of every pair on the group's stream of `device`, and
  // returns an event after them. The memory of these tensors and of `kept` is not reused before
  // that event is reached; tensors whose memory is not torch's are held until a later call.
  std::shared_ptr<DeviceEvent> finish(at::Device device, const std::vector<CopyPair>& pairs,
                                      const std::vector<at::Tensor>& kept);
  // Waits, up to the deadline, until no tensors are held, and leaks the others. Call at the end of
  // the group.
  void await_held(ipc::Deadline deadline);
  // Calls `act` with the group's streams as the current ones. An event that `act` records on them
  // is reached after all results that were enqueued before.
  void with_group_streams(const std::vector<at::Device>& devices, c10::function_ref<void()> act);
  // Like with_group_streams(), for an `act` that completes a future.
  void complete(const std::vector<at::Device>& devices, c10::function_ref<void()> act);

 private:
  struct HeldTensors {
    std::shared_ptr<DeviceEvent> until;
    std::vector<at::Tensor> tensors;
  };
  void hold(HeldTensors more);
  cuda::Stream stream(at::Device device);  // the group's stream on `device`
  std::vector<cuda::Stream> streams(const std::vector<at::Device>& devices);

  const std::shared_ptr<TorchRuntime> torch_;
  std::mutex mutex_;
  std::map<c10::DeviceIndex, cuda::Stream> streams_;  // the group's streams
  std::vector<HeldTensors> held_;
};

}  // namespace pycollect::dist
