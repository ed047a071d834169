// Messages of tensors on devices that do not go through the host's memory: the sender's lies in
// memory of its device that the receiver opens, who copies it and says so; the mailbox carries the
// ticket. A message larger than the memory for it goes in parts, one after the other through the
// same place. All waiting is the hosts': no stream waits for another process, and no message for a
// collective. What one of the two cannot do, they do through pinned memory.
#pragma once
#include <atomic>

#include "../../../shm/mailbox.h"
#include "../../../slabs/depot.h"
#include "ladder.h"

namespace pycollect::dist {

using Transfer = shm::Mailbox::Transfer;

// One end of such a message.
class Parcel : public Passage {
 public:
  // In the caller's thread, or when it has arrived.
  virtual std::shared_ptr<Transfer> post(shm::Mailbox& mailbox, std::optional<Rank> peer,
                                         const shm::Envelope& envelope) = 0;
  // Does what it is its turn to do, by one thread at a time. Returns whether a device has something
  // of it in hand, which rings no bell when it is done. Throws what fails.
  virtual bool advance(shm::Mailbox& mailbox, Transfer& transfer,
                       const shm::Occasion& occasion) = 0;
  // Instead of that, when it has thrown: the other end must not wait for this one.
  virtual void give_up(shm::Mailbox& mailbox, Transfer& transfer) = 0;
};

// What the messages of a group have in common.
class Parcels {
 public:
  // A smaller message goes through pinned memory: both ways have about the same number of steps
  // between the hosts, and what that saves is the copies. A guess: it is not measured.
  static constexpr std::size_t kLeastBytes = 64 << 10;

  Parcels(std::shared_ptr<shm::Group> group, std::shared_ptr<const Ladder> ladder);

  // Can parcels come here at all? If not, their senders need not try again.
  bool takes_any() const { return ladder_->shares_memory(); }
  std::shared_ptr<Passage> staged() const { return stage_through_host(devices_); }
  // Null: the message is to go through pinned memory.
  std::shared_ptr<Parcel> outgoing(const std::shared_ptr<Parcels>& self, const at::Tensor& tensor,
                                   Rank to);
  std::shared_ptr<Parcel> incoming(const std::shared_ptr<Parcels>& self, const at::Tensor& tensor);

  // Ends it: no more messages. Waits so long for what devices have in hand; returns whether they
  // have come to its end. If not, no memory may be let go of.
  bool close(shm::Deadline deadline);

 private:
  friend class OutParcel;
  friend class InParcel;

  // What must stay until a device is done with it; then the block is free.
  struct Lingering {
    std::shared_ptr<Mark> until;
    std::vector<at::Tensor> held = {};
    std::optional<slabs::Depot::Block> block = {};
  };
  void let_linger(Lingering what);
  bool sweep();  // returns whether nothing is left
  // A bit for each rank.
  using Ranks = std::atomic<uint64_t>;
  static bool has(const Ranks& ranks, Rank r) { return (ranks.load() >> r & 1) != 0; }
  static void add(Ranks& ranks, Rank r) { ranks.fetch_or(uint64_t{1} << r); }
  std::shared_ptr<slabs::Depot> depot();
  std::size_t most();  // bytes of a part
  slabs::Device number(at::Device device) const { return devices_->stream(device).device; }
  uint64_t new_stamp();
  // Throws when the peer may have freed what it has sent, and what it throws names it.
  void require_there(Rank peer, const shm::Occasion& occasion);
  void say_vain(Rank from, const std::string& why);
  void refused_by(Rank to);
  static void say_way();
  void say(Rank from, Rank to, const std::string& why) const;

  const std::shared_ptr<shm::Group> group_;
  const std::shared_ptr<const Ladder> ladder_;
  // With streams of their own: whatever a collective's waits for is no matter of a message.
  const std::shared_ptr<Devices> devices_;
  Ranks refusing_{0};   // cannot fetch what lies here
  Ranks confirmed_{0};  // have fetched something
  Ranks verified_{0};   // what was read of theirs was what they had written
  Ranks vain_{0};       // what lies there cannot be fetched
  std::mutex mutex_;    // of what follows
  std::shared_ptr<slabs::Depot> depot_;
  std::vector<Lingering> lingering_;
  uint64_t stamp_;
};

}  // namespace pycollect::dist
