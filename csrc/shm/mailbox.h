// Messages between two processes: sends and receives that match by peer and tag, each of which
// moves on by itself. Small ones are copied into the peer's ring at once; the pieces of a large one
// follow in another when the receiver has found the receive that it belongs to and asks for them,
// so nothing that nobody waits for can be in the way of what somebody does. A rank may be its own
// peer.
//
// One thread at a time moves things, and rings for whoever may sleep for what was moved.
#pragma once
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "mail_incoming.h"
#include "mail_outgoing.h"

namespace pycollect::shm {

class Mailbox {
 public:
  static std::size_t bytes(int world) { return MailArea::bytes(world); }  // of the group's memory

  explicit Mailbox(Group& group);
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // Neither waits for anybody. The memory must stay until the transfer is done. A receive of
  // another size or dtype than was sent fails with std::invalid_argument and leaves the memory as
  // it was; so does the send, unless the message was so small that it was done when it was sent.
  TransferPtr send(Rank to, const Envelope& envelope, const std::byte* data);
  TransferPtr receive(std::optional<Rank> from, const Envelope& envelope, std::byte* into);

  // A send of which only the first bytes are `there` yet. It goes as far as they do, past which
  // goes what has come whole.
  TransferPtr send_partly(Rank to, const Envelope& envelope, const std::byte* data, uint64_t there);
  // So many of its bytes are there now. Moves none of them: `progress` does, and whoever waits.
  void supply(Transfer& send, uint64_t there);

  // Moves whatever can be moved, unless another thread is at it. Returns whether anything was.
  bool progress();
  // Is nothing of this rank's under way?
  bool idle() const { return open_.load(std::memory_order_acquire) == 0; }
  // Moves things, and sleeps when there are none to move, until the transfer is done. Any number of
  // threads may wait at a time. Throws what it failed with; PeerLost and Timeout, and with those
  // everything that is under way fails.
  void wait(Transfer& transfer, const Occasion& occasion);
  struct Until {
    // Looked at whenever something moves, about every 10 ms when nothing does, and after `wake`;
    // may move what the mailbox knows nothing of.
    std::function<bool()> holds;
    std::function<std::vector<Rank>()> missing;  // whom it depends on
    Transfer* transfer = nullptr;                // whose end it is, if of any
    std::function<bool()> glances = {};          // is it to be looked at every 50 us?
  };
  // The same until that holds, whatever has failed meanwhile.
  void wait(const Until& until, const Occasion& occasion);
  void wake();
  void fail(const std::exception_ptr& error);  // everything that is under way, with this
  std::vector<Rank> missing(const Transfer& transfer) const;  // whom it depends on
  Rank rank() const { return me_; }

 private:
  class Watch;  // a thread that waits: mail_wait.cpp
  using Locked = std::unique_lock<std::mutex>;

  Rank check_to(Rank to) const;
  Rank check_from(std::optional<Rank> from) const;
  TransferPtr ask(const char* operation, TransferPtr transfer, const std::function<void()>& act);
  template <class Act>
  void guard(const Act& act);
  bool move(Locked locked);
  bool unlock(Locked locked);
  bool move_all(const Until& until);
  std::vector<Rank> anybody() const;  // if it is all the same who, those that are there

  Group& group_;
  Origin origin_;  // a forked child must not touch the queues of its parent
  MailArea area_;
  Rank me_;
  Effects effects_;
  Outgoing outgoing_;
  Incoming incoming_;
  std::mutex mutex_;
  std::atomic<uint64_t> requests_{0};
  std::atomic<int> open_{0};   // transfers that are not done
  std::atomic<int> awake_{0};  // threads that wait and do not sleep
  Bell beside_;                // of those who sleep while another thread is awake
};

}  // namespace pycollect::shm
