// Point-to-point messages between processes: sends and receives match by peer and tag, and each
// makes progress independently. Small messages are copied into the peer's ring at once (eager). The
// fragments of a large one go through a second ring after RTS and CTS, when the receiver has
// matched it; so no unexpected message blocks an expected one. A rank may be its own peer.
// A peer's number is its rank, except in a world of several hosts: there the ranks of this host
// come first, and then the others, both in the order of their ranks.
//
// One thread at a time makes progress, and rings the doorbells of ranks that may sleep until then.
#pragma once
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "mailbox_ends.h"

namespace pycollect::ipc {

class Mailbox : private RemoteEvents {
 public:
  // Bytes of shared memory for the mailboxes of a group.
  static std::size_t bytes(int world) { return MailArea::bytes(world); }
  static std::size_t header_bytes(int world) { return MailArea::header_bytes(world); }

  // `remote`: null if all ranks are on this host.
  explicit Mailbox(Group& group, std::shared_ptr<RemotePeers> remote = nullptr);
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // Posts a transfer, without waiting. If size or dtype of send and receive differ, the receive
  // fails with std::invalid_argument and leaves its buffer unchanged. The send fails, too, unless
  // it was eager and therefore done at once.
  void post(const TransferPtr& transfer);
  // Fails a transfer instead of posting it.
  void fail_unposted(Transfer& transfer, std::exception_ptr error) {
    if (transfer.finish(std::move(error))) wake();
  }

  // Returns whether it matters that a message of so many bytes has an owner.
  bool uses_owner(uint64_t bytes) const {
    return remote_ && bytes > MailArea::max_eager_bytes(MailArea::kRemoteSharers);
  }

  // Makes progress, unless another thread does so now. Returns true if anything was moved.
  bool progress();
  // Returns true if no transfer of this rank is pending.
  bool idle() const { return open_.load(std::memory_order_acquire) == 0; }
  // Returns true if all eager messages are where their receivers find them after this rank has
  // left.
  bool has_delivered() { return !remote_ || remote_->has_delivered(); }
  // Whether the connection to a peer on another host is closed.
  bool is_gone(Rank peer) const { return area_.is_remote(peer) && remote_->is_gone(peer); }
  bool any_gone() const { return remote_ && remote_->any_gone(); }
  struct WaitCondition {
    // Condition that ends the wait: checked after any progress, about every 10 ms otherwise, and
    // after `wake`. May itself do work outside the mailbox.
    std::function<bool()> holds;
    std::function<std::vector<Rank>()> missing;  // the ranks that `holds` depends on
    Transfer* transfer = nullptr;                // the transfer that ends the wait, if any
    std::function<bool()> polls = {};            // true: check `holds` every 50 us
  };
  // Makes progress, and sleeps when there is none to make, until `until.holds()`. Any number of
  // threads may wait at a time. Throws only if it does not hold at the end: PeerLost or Timeout,
  // which fail all pending transfers.
  void wait(const WaitCondition& until, const OpContext& context);
  void wake();
  void fail(const std::exception_ptr& error);  // fails all pending transfers
  // Returns the ranks on which a transfer depends: this one if it has not been posted.
  std::vector<Rank> missing(const Transfer& transfer) const;

 private:
  class Waiter;  // the wait of one thread, defined in mailbox.cpp
  using Locked = std::unique_lock<std::mutex>;

  void hello(Rank from) override;
  void received(Rank from, uint64_t number) override;
  void sent(Rank to, uint64_t number) override;

  // Opens a peer on another host or, for kAnySource, all of them.
  void open(Rank peer);
  void enqueue(const TransferPtr& transfer);
  template <class Act>
  void guard(const Act& act);
  bool progress_locked(Locked locked);
  bool unlock(Locked locked);
  bool drain(const WaitCondition& until);
  std::vector<Rank> needed(const WaitCondition& until);
  void check_remote(const WaitCondition& until, const OpContext& context);
  std::vector<Rank> wildcard_sources() const;  // the ranks that a wildcard receive depends on

  Group& group_;
  const std::shared_ptr<RemotePeers> remote_;
  ForkGuard fork_guard_;  // a forked child must not touch the queues of its parent
  MailArea area_;
  Rank me_;
  Wakeups wakeups_;
  Outgoing outgoing_;
  Incoming incoming_;
  std::mutex mutex_;
  std::atomic<uint64_t> requests_{0};
  std::atomic<int> open_{0};   // transfers that are not done
  std::atomic<int> awake_{0};  // waiting threads that do not sleep
  Doorbell standby_doorbell_;  // for threads that sleep while another one is awake
};

}  // namespace pycollect::ipc
