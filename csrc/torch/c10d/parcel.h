// The two ends of a message through memory of devices.
#pragma once
#include "parcels.h"

namespace pycollect::dist {

// The sender's: a block with a copy, made behind what is on the caller's stream, or the tensor
// itself where others reach it. Whoever cannot fetch it asks for the bytes.
class OutParcel final : public Parcel {
 public:
  // In front of a block's data: the stamp, twice, and up to where aligned copies begin.
  static constexpr std::size_t kHeadBytes = 256;

  struct Terms {
    Rank to;
    slabs::Depot::Block where;
    bool lent;       // it is the tensor's own memory
    uint64_t stamp;  // for a receiver that has not fetched anything yet; otherwise 0
  };
  OutParcel(std::shared_ptr<Parcels> all, const Terms& terms)
      : devices_(all->devices_), terms_(terms), all_(std::move(all)) {}

  shm::Span enter(const at::Tensor& tensor, bool reads, bool writes) override;
  void depart() override;
  bool arrived() override { return left_->reached(); }
  void land(const shm::Occasion& occasion) override;
  bool landed() override { return true; }
  void join() override {}  // nothing of it is for what follows
  void let_go() override;
  const std::vector<at::Device>& on() const override { return on_; }
  Devices& devices() const override { return *devices_; }

  std::shared_ptr<Transfer> post(shm::Mailbox& mailbox, std::optional<Rank> peer,
                                 const shm::Envelope& envelope) override;
  bool advance(shm::Mailbox& mailbox, Transfer& transfer, const shm::Occasion& occasion) override;
  void give_up(shm::Mailbox& mailbox, Transfer& transfer) override;

 private:
  std::size_t head() const { return terms_.lent ? 0 : kHeadBytes; }
  void stage(Transfer& transfer);

  const std::shared_ptr<Devices> devices_;
  const Terms terms_;
  std::shared_ptr<Parcels> all_;  // until it has ended: they keep the group
  std::vector<at::Device> on_;
  at::Tensor tensor_, dense_;  // dense_: what the receiver copies
  std::shared_ptr<Mark> left_;
  at::Tensor pinned_;             // for a receiver that asks for the bytes
  std::shared_ptr<Mark> staged_;  // null: none has
  bool supplied_ = false;
};

// The receiver's: copies on the group's stream, behind what the caller's still has to do with the
// tensor.
class InParcel final : public Parcel {
 public:
  explicit InParcel(std::shared_ptr<Parcels> all)
      : devices_(all->devices_), all_(std::move(all)) {}

  shm::Span enter(const at::Tensor& tensor, bool reads, bool writes) override;
  void depart() override { left_ = devices_->mark(on_[0]); }
  bool arrived() override { return true; }
  void land(const shm::Occasion& occasion) override;
  bool landed() override { return end_ == nullptr || end_->reached(); }
  void join() override;
  void let_go() override;
  const std::vector<at::Device>& on() const override { return on_; }
  Devices& devices() const override { return *devices_; }

  std::shared_ptr<Transfer> post(shm::Mailbox& mailbox, std::optional<Rank> peer,
                                 const shm::Envelope& envelope) override;
  bool advance(shm::Mailbox& mailbox, Transfer& transfer, const shm::Occasion& occasion) override;
  void give_up(shm::Mailbox& mailbox, Transfer& transfer) override { mailbox.fetched(transfer); }

 private:
  bool begin(const shm::Ticket& ticket, Rank from);
  bool is_right() const;
  void receive_bytes(shm::Mailbox& mailbox, Transfer& transfer, bool never);

  const std::shared_ptr<Devices> devices_;
  std::shared_ptr<Parcels> all_;  // until it has ended: they keep the group
  std::vector<at::Device> on_;
  at::Tensor tensor_;
  std::shared_ptr<Mark> left_, end_;  // end_: of a copy to the tensor
  bool fetches_ = false;              // that copy is one from the sender's memory
  uint64_t stamp_ = 0;                // that must be found there
  at::Tensor found_;                  // in pinned memory
  at::Tensor room_;                   // pinned, for bytes
};

}  // namespace pycollect::dist
