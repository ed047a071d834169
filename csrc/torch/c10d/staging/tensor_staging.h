// Staging of one call's device tensors to the executor's memory and back. Begins on the caller's
// thread, ends on the thread that runs the call. No copy starts before `begin_copy_in`.
#pragma once
#include <memory>
#include <vector>

#include "../../../rank_executor/request.h"
#include "device_ops.h"

namespace pycollect::dist {

class TensorStaging {
 public:
  virtual ~TensorStaging() = default;
  // Returns where the executor finds the tensor's elements, in logical order.
  virtual ipc::BufferSegment add_tensor(const at::Tensor& tensor, bool reads, bool writes) = 0;
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

}  // namespace pycollect::dist
