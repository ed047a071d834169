// Device tensors of a group. DeviceOps has the copies, events and streams; a TensorStaging gives
// the executor the data of one call's device tensors, and copies the results back.
#pragma once
#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../../group/wait.h"
#include "../../rank_executor/request.h"
#include "../torch_runtime.h"

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

// Device operations for the collectives, or the messages, of one group: allocation, copies, events,
// and queries of stream capture. DeviceOps owns one stream per device, "the group's stream". The
// "current stream" of a device is torch's, for the calling thread: the stream of the caller.
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

// Staging of one call's device tensors to the executor's memory and back. Begins on the caller's
// thread, ends on the thread that runs the call. No copy starts before `begin_copy_in`.
class TensorStaging {
 public:
  virtual ~TensorStaging() = default;
  // Returns where the executor finds the tensor's elements, in logical order.
  virtual ipc::BufferSpan add_tensor(const at::Tensor& tensor, bool reads, bool writes) = 0;
  virtual void begin_copy_in() = 0;  // starts the copies of the inputs; call after the last tensor
  virtual bool inputs_ready() = 0;   // whether the executor may begin
  // Starts the copies of the results to the tensors, after the executor has ended.
  virtual void begin_copy_out() = 0;
  virtual bool outputs_ready() = 0;  // whether the results are in the tensors
  // Makes the calling thread's current streams wait for the results.
  virtual void wait_on_current_streams() = 0;
  // Calls `act`, which completes a future, with current streams on which the results are complete.
  virtual void complete(c10::function_ref<void()> act) { devices().complete(on(), act); }
  virtual void release() = 0;  // releases the tensors when the call has ended
  virtual const std::vector<at::Device>& on() const = 0;
  virtual DeviceOps& devices() const = 0;
};

// Returns the staging of processes' tensors, in pinned memory around the host executor.
std::shared_ptr<TensorStaging> stage_through_host(std::shared_ptr<DeviceOps> devices);

// Throws std::invalid_argument if a current stream on one of the staging's devices is under
// capture, in which `operation` cannot wait.
void check_no_capture(const TensorStaging& staging, const char* operation);

// Device tensors of a rank that is a thread: the ranks' common call uses them in place. Only
// tensors that are not contiguous are copied. Events order the call after the streams of all ranks.
class StreamOrdering final : public TensorStaging {
 public:
  explicit StreamOrdering(std::shared_ptr<DeviceOps> devices) : devices_(std::move(devices)) {}

  ipc::BufferSpan add_tensor(const at::Tensor& tensor, bool reads, bool writes) override;
  void begin_copy_in() override;
  bool inputs_ready() override { return true; }  // the call is ordered by streams
  // For the thread that runs the call, as wait_for_inputs(). Ends the rank's part: copies results,
  // and records that they are there.
  void begin_copy_out() override;
  bool outputs_ready() override;
  void wait_on_current_streams() override;
  void complete(c10::function_ref<void()> act) override;
  void release() override;
  const std::vector<at::Device>& on() const override { return on_; }
  DeviceOps& devices() const override { return *devices_; }

  void add_whole(const at::Tensor& tensor);  // adds a tensor that is used as it is, strided or not

  // For the thread that runs the call, with its current streams.
  void wait_for_inputs();  // orders these streams after the rank's
  // Ends the rank's part where its inputs are ready: the call reads a copy.
  void end_with_inputs() { outputs_ = inputs_; }
  const std::vector<at::Tensor>& tensors() const { return tensors_; }

 private:
  void add_device(at::Device device);
  const std::shared_ptr<DeviceOps> devices_;
  std::vector<at::Device> on_;
  std::vector<at::Tensor> tensors_;  // all memory of this rank that the call uses
  std::vector<CopyPair> in_, out_;
  std::vector<std::shared_ptr<DeviceEvent>> inputs_, outputs_;  // [device of on_]
};

}  // namespace pycollect::dist
