// Staging of a large message between a device tensor and the mailbox: through pinned memory, in
// fragments, so that device copies overlap with copies between processes. A smaller message is one
// fragment and uses stage_through_host.
#pragma once
#include "tensor_staging.h"

namespace pycollect::dist {

class MessageStaging final : public TensorStaging {
 public:
  // Only the device copies of the sender's first and the receiver's last fragment are not
  // overlapped. A fragment costs a copy launch and an event. Both constants are guesses, not
  // measured.
  static constexpr std::size_t kFragmentBytes = 1 << 20;
  static constexpr std::size_t kMaxFragments = 64;  // larger messages have larger fragments

  static bool serves(const at::Tensor& tensor) { return tensor.nbytes() > kFragmentBytes; }

  explicit MessageStaging(std::shared_ptr<DeviceOps> devices) : devices_(std::move(devices)) {}

  // Takes one tensor, which is either read or written.
  ipc::BufferSegment add_tensor(const at::Tensor& tensor, bool reads, bool writes) override;
  void begin_copy_in() override;
  bool inputs_ready() override { return arrived_bytes() != 0; }
  // For a send: the number of bytes, from the start, that have arrived in pinned memory.
  std::size_t arrived_bytes();
  // For a receive: copies complete fragments to the device, once `moved` bytes have arrived.
  void forward(std::size_t moved);
  void begin_copy_out(const ipc::OpContext& context) override;
  bool outputs_ready() override { return outputs_ready_ == nullptr || outputs_ready_->reached(); }
  void wait_on_current_streams() override;
  void release() override;
  const std::vector<at::Device>& on() const override { return on_; }
  DeviceOps& devices() const override { return *devices_; }

 private:
  std::size_t whole_fragments(std::size_t moved) const {
    return moved == bytes_ ? bytes_ : moved / fragment_bytes_ * fragment_bytes_;
  }

  const std::shared_ptr<DeviceOps> devices_;
  std::vector<at::Device> on_;
  at::Tensor tensor_;
  at::Tensor dense_;   // tensor_, or a contiguous tensor on its device
  at::Tensor pinned_;  // as large as tensor_
  std::size_t bytes_ = 0, fragment_bytes_ = 0;
  bool reads_ = false;
  std::vector<std::unique_ptr<DeviceEvent>> fragments_;  // for a send: one event per fragment
  std::size_t arrived_ = 0;  // number of fragments whose event is reached
  std::shared_ptr<DeviceEvent> requested_at_, outputs_ready_;  // events of a receive
  std::size_t forwarded_ = 0;                                  // bytes copied to the device
};

}  // namespace pycollect::dist
