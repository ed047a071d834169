// Staging of a large message between a device tensor and the mailbox: through pinned memory, in
// fragments, so that device copies overlap with copies between processes. A smaller message is one
// fragment and uses stage_through_host.
#pragma once
#include "tensor_staging.h"

namespace pycollect::dist {

class MessageStaging final : public TensorStaging {
 public:
  // Only the first fragment's copy on one end and the last one's on the other cannot be hidden. A
  // fragment costs a copy launch and an event. Both constants are guesses, not measured.
  static constexpr std::size_t kPieceBytes = 1 << 20;
  static constexpr std::size_t kMostPieces = 64;  // larger messages have larger fragments

  static bool serves(const at::Tensor& tensor) { return tensor.nbytes() > kPieceBytes; }

  explicit MessageStaging(std::shared_ptr<GroupDevices> devices) : devices_(std::move(devices)) {}

  // Takes one tensor, which is either read or written.
  shm::BufferSegment add_tensor(const at::Tensor& tensor, bool reads, bool writes) override;
  void begin_copy_in() override;
  bool inputs_ready() override { return arrived_bytes() != 0; }
  // For a send: the number of bytes, from the start, that have arrived in pinned memory.
  std::size_t arrived_bytes();
  // For a receive: copies complete fragments to the device, once `moved` bytes have arrived.
  void forward(std::size_t moved);
  void begin_copy_out(const shm::OpContext& context) override;
  bool outputs_ready() override { return outputs_ready_ == nullptr || outputs_ready_->reached(); }
  void wait_on_current_streams() override;
  void release() override;
  const std::vector<at::Device>& on() const override { return on_; }
  GroupDevices& devices() const override { return *devices_; }

 private:
  std::size_t whole_pieces(std::size_t moved) const {
    return moved == bytes_ ? bytes_ : moved / piece_ * piece_;
  }

  const std::shared_ptr<GroupDevices> devices_;
  std::vector<at::Device> on_;
  at::Tensor tensor_;
  at::Tensor dense_;   // tensor_, or a contiguous tensor on its device
  at::Tensor pinned_;  // as large as tensor_
  std::size_t bytes_ = 0, piece_ = 0;
  bool reads_ = false;
  std::vector<std::unique_ptr<DeviceEvent>> pieces_;   // for a send: one mark per fragment
  std::size_t arrived_ = 0;                            // number of reached marks
  std::unique_ptr<DeviceEvent> left_, outputs_ready_;  // marks of a receive
  std::size_t forwarded_ = 0;                          // bytes copied to the device
};

}  // namespace pycollect::dist
