// Device tensors of a rank that is a thread: the ranks' common call uses them in place. Only
// tensors that are not contiguous are copied. Events order the call after the streams of all ranks.
#pragma once
#include <memory>
#include <vector>

#include "../staging/tensor_staging.h"

namespace pycollect::dist {

class DirectStaging final : public TensorStaging {
 public:
  explicit DirectStaging(std::shared_ptr<DeviceOps> devices) : devices_(std::move(devices)) {}

  ipc::BufferSegment add_tensor(const at::Tensor& tensor, bool reads, bool writes) override;
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
