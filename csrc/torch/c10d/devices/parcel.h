// The two ends of a message through memory of devices.
#pragma once
#include "parcels.h"

namespace pycollect::dist {

// The sender's: a block with a copy, made behind what is on the caller's stream, or the tensor
// itself where others reach it. Whoever cannot fetch it asks for the bytes. Parts but the first are
// copied on the group's stream, when the one before has been fetched.
class OutParcel final : public Parcel {
 public:
  // In front of a block's data: the stamp, twice, and up to where aligned copies begin.
  static constexpr std::size_t kHeadBytes = 256;

  struct Terms {
    Rank to;
    slabs::Depot::Block where;
    bool lent;         // it is the tensor's own memory
    std::size_t part;  // bytes of each part but the last
    uint64_t stamp;    // for a receiver that has not fetched anything yet; otherwise 0
  };
  OutParcel(std::shared_ptr<Parcels> all, const Terms& terms)
      : devices_(all->devices_), terms_(terms), all_(std::move(all)) {}
  ~OutParcel() override;

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
  bool in_parts() const { return terms_.part < bytes_; }
  void stage(Transfer& transfer);
  void copy_next();

  const std::shared_ptr<Devices> devices_;
  const Terms terms_;
  std::shared_ptr<Parcels> all_;  // until it has ended: they keep the group
  std::vector<at::Device> on_;
  at::Tensor tensor_;
  at::Tensor dense_;  // all of it: in the block, or else the tensor or a copy that is contiguous
  std::size_t bytes_ = 0, begin_ = 0;    // begin_: of the part that is in the block
  std::shared_ptr<Mark> left_, copied_;  // copied_: of the last part but the first
  bool departed_ = false, copying_ = false;
  at::Tensor pinned_;             // for a receiver that asks for the bytes
  std::shared_ptr<Mark> staged_;  // null: none has
  bool supplied_ = false;
};

// The receiver's: copies on the group's stream, behind what the caller's still has to do with the
// tensor.
class InParcel final : public Parcel {
 public:
  explicit InParcel(std::shared_ptr<Parcels> all) : devices_(all->devices_), all_(std::move(all)) {}

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
  bool open(const shm::Ticket& ticket, Rank from);
  void copy_part();
  void end_part(shm::Mailbox& mailbox, Transfer& transfer);
  bool is_right() const;
  void receive_bytes(shm::Mailbox& mailbox, Transfer& transfer, bool never);

  const std::shared_ptr<Devices> devices_;
  std::shared_ptr<Parcels> all_;  // until it has ended: they keep the group
  std::vector<at::Device> on_;
  at::Tensor tensor_;
  at::Tensor dense_;                  // as large, contiguous: for parts of a tensor that is not
  std::shared_ptr<Mark> left_, end_;  // end_: of the last copy
  bool copying_ = false;              // that is one from the sender's memory
  std::byte* theirs_ = nullptr;       // where each part is; null: not opened
  std::size_t part_ = 0, begin_ = 0;  // bytes of a part; those that have been fetched
  uint64_t stamp_ = 0;                // that must be found there
  at::Tensor found_;                  // in pinned memory
  at::Tensor room_;                   // pinned, for bytes
};

}  // namespace pycollect::dist
