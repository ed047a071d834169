// The way of a large message between a tensor on a device and the mailbox: through pinned memory, a
// piece at a time, so that the copies of the device and those between the processes are under way
// together. A smaller message is one piece, which stage_through_host takes.
#pragma once
#include "passage.h"

namespace pycollect::dist {

class MessageStaging final : public Passage {
 public:
  // What cannot be hidden is the first piece's copy on one side and the last one's on the other; a
  // piece costs a copy's launch and an event. Both numbers are guesses: they are not measured.
  static constexpr std::size_t kPieceBytes = 1 << 20;
  static constexpr std::size_t kMostPieces = 64;  // of a larger message, larger ones

  static bool serves(const at::Tensor& tensor) { return tensor.nbytes() > kPieceBytes; }

  explicit MessageStaging(std::shared_ptr<Devices> devices) : devices_(std::move(devices)) {}

  // One tensor, which is read or written.
  shm::Span enter(const at::Tensor& tensor, bool reads, bool writes) override;
  void depart() override;
  bool arrived() override { return arrived_bytes() != 0; }
  // Of what is read: bytes that have come to pinned memory, from the first on.
  std::size_t arrived_bytes();
  // Of what is written: sends on what has come whole pieces of, when so many bytes have come.
  void forward(std::size_t moved);
  void land(const shm::Occasion& occasion) override;
  bool landed() override { return landed_ == nullptr || landed_->reached(); }
  void join() override;
  void let_go() override;
  const std::vector<at::Device>& on() const override { return on_; }
  Devices& devices() const override { return *devices_; }

 private:
  std::size_t whole_pieces(std::size_t moved) const {
    return moved == bytes_ ? bytes_ : moved / piece_ * piece_;
  }

  const std::shared_ptr<Devices> devices_;
  std::vector<at::Device> on_;
  at::Tensor tensor_;
  at::Tensor dense_;   // the tensor, or one on its device that is contiguous
  at::Tensor pinned_;  // as large
  std::size_t bytes_ = 0, piece_ = 0;
  bool reads_ = false;
  std::vector<std::unique_ptr<Mark>> pieces_;  // behind each that is read
  std::size_t arrived_ = 0;                    // of these
  std::unique_ptr<Mark> left_, landed_;        // of what is written
  std::size_t forwarded_ = 0;                  // bytes
};

}  // namespace pycollect::dist
