// Point-to-point messages between processes: sends and receives match by peer and tag, and each
// makes progress independently. Small messages are copied into the peer's ring at once (eager). The
// fragments of a large one go through a second ring after RTS and CTS, when the receiver has
// matched it; so no unexpected message blocks an expected one. A rank may be its own peer.
// A peer's number is its rank, except in a world of several hosts: there the ranks of this host
// come first, and then the others, both in the order of their ranks.
//
// One thread at a time makes progress, and rings the doorbells of ranks that may sleep until then.
#pragma once
#include <compare>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "mail_area.h"
#include "transfer.h"

namespace pycollect::ipc {

class Mailbox {
 public:
  // `remote`: null if all ranks are on this host.
  explicit Mailbox(Group& group, std::shared_ptr<RemotePeers> remote = nullptr);
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // Posts a transfer, without waiting. If size or dtype of send and receive differ, the receive
  // fails with std::invalid_argument and leaves its buffer unchanged. The send fails, too, unless
  // it was eager and therefore done at once.
  void post(const TransferPtr& transfer);

  // Returns whether it matters that a message of so many bytes has an owner.
  bool uses_owner(uint64_t bytes) const {
    return remote_ && bytes > MailArea::max_eager_bytes(MailArea::kRemoteSharers);
  }

  // Makes progress, unless another thread does so now. Returns true if anything was moved.
  bool progress();
  // Returns true if no transfer of this rank is pending.
  bool idle() const { return pending_.load(std::memory_order_acquire) == 0; }
  // Returns true if a send waits for its data.
  bool awaits_data() const { return unready_ != 0; }
  // Returns true if all eager messages are where their receivers find them after this rank has
  // left.
  bool has_delivered() { return !remote_ || remote_->has_delivered(); }
  // Whether the connection to a peer on another host is closed.
  bool is_gone(Rank peer) const { return is_remote(peer) && remote_->is_gone(peer); }
  bool any_gone() const { return remote_ && remote_->any_gone(); }
  struct WaitCondition {
    // Condition that ends the wait: checked after any progress, about every 10 ms otherwise, and
    // after `wake`.
    std::function<bool()> holds;
    std::function<std::vector<Rank>()> missing;  // the ranks that `holds` depends on
    Transfer* transfer = nullptr;                // the transfer that ends the wait, if any
  };
  // Makes progress, and sleeps when there is none to make, until `until.holds()`. Any number of
  // threads may wait at a time. Throws only if it does not hold at the end: PeerLost or Timeout,
  // which fail all pending transfers.
  void wait(const WaitCondition& until, const OpContext& context);
  void wake();
  void fail(const std::exception_ptr& error);          // fails all pending transfers
  void fail_unready(const std::exception_ptr& error);  // fails the sends that wait for their data
  // Returns the ranks on which a transfer depends: this one if it has not been posted, or if the
  // data of a send is not there.
  std::vector<Rank> missing(const Transfer& transfer) const;

  // For RemotePeers: a peer says hello; the data of a message to or from it has been moved
  // directly. `number`: of the message among those of its sender to its receiver.
  void hello(Rank from);
  void moved_directly(Rank peer, bool sent, uint64_t number);

 private:
  // Messages taken from one peer before the lock is released, so that a peer that never stops
  // sending does not hold up other threads. Taking them lasts about 10 us.
  static constexpr int kMostTaken = 100;

  class Waiter;  // the wait of one thread, defined in mailbox.cpp
  using Locked = std::unique_lock<std::mutex>;
  struct MatchKey {
    Rank peer;  // or kAnySource
    uint32_t tag;
    auto operator<=>(const MatchKey&) const = default;
  };
  struct PostedReceive {
    uint64_t order;
    TransferPtr transfer;
  };
  struct UnexpectedMessage {
    Record record;
    std::unique_ptr<std::byte[]> payload;
  };
  struct Reply {
    Record record;
    TransferPtr refused = {};  // NACK: the receive, which stays pending until the NACK is sent
    std::exception_ptr error = {};
  };
  using ByNumber = std::unordered_map<uint64_t, TransferPtr>;  // [number of the message]
  struct MailPeer {
    Rank rank;
    std::size_t turn;  // index in open_
    RingWriter messages_to, fragments_to, replies_to;
    RingReader messages_from, fragments_from, replies_from;

    uint64_t sent = 0;                     // messages
    std::deque<TransferPtr> unready = {};  // a send that waits for its data, and those after it
    std::deque<TransferPtr> queued = {};   // sends that wait for room
    ByNumber awaiting = {};                // sends without a CTS, or whose data moves directly
    std::deque<TransferPtr> cleared = {};  // large sends that got a CTS

    std::deque<Reply> replies = {};  // that wait for room
    std::size_t unexpected_bytes = 0;
    ByNumber requested = {};  // receives for which a CTS was sent or is queued
  };
  using PostedReceives =
      std::multimap<MatchKey, PostedReceive>;  // equal keys stay in the order of insertion
  // Wake-ups that are collected while the mailbox is locked and issued after it is unlocked.
  struct Wakeups {
    uint64_t touched = 0;         // bit r: rank r may be asleep, and its doorbell must ring
    std::vector<Rank> publish{};  // ranks on other hosts to which news must be sent
    int finished = 0;             // number of finished transfers
    bool awaited = false;         // threads of this rank that sleep must look
    static_assert(kMaxRanks <= 64);
  };

  bool is_remote(Rank r) const { return r >= group_.world(); }
  // The number of ranks with which a pair shares memory, on which the sizes of its rings depend.
  int sharers(Rank peer) const {
    return is_remote(peer) ? MailArea::kRemoteSharers : group_.world();
  }
  // Opens a peer or, for kAnySource, all of them. Call before the first message to or from it.
  void open(Rank peer);
  template <class Act>
  void guard(const Act& act);
  void touch(Rank r);
  void finish(Transfer& transfer, std::exception_ptr error = nullptr);
  void fail_locked(const std::exception_ptr& error);
  bool progress_locked(Locked locked);
  bool unlock(Locked locked);
  bool drain(const WaitCondition& until);
  std::vector<Rank> needed(const WaitCondition& until);
  void check_remote(const WaitCondition& until, const OpContext& context);
  std::vector<Rank> wildcard_sources() const;  // the ranks that a wildcard receive depends on

  // outgoing.cpp: writes messages into the peers' rings in order, queues messages that do not fit
  // yet, and writes the fragments of large ones after the receiver's CTS.
  void send(MailPeer& peer, const TransferPtr& transfer);
  void send_now(MailPeer& peer, const TransferPtr& transfer);
  void send_ready(MailPeer& peer);
  bool push_message(MailPeer& peer, const TransferPtr& transfer);
  void read_replies(MailPeer& peer);
  bool push_fragment(MailPeer& peer, Transfer& transfer);
  void push_fragments(MailPeer& peer);
  void progress_outgoing();

  // incoming.cpp: matches messages with receives, buffers unexpected messages, and requests the
  // fragments of large ones (CTS). Throws CollectiveError when a peer has written an invalid
  // record.
  //
  // A message matches a receive when peer and tag are equal. Messages and receives match in the
  // order in which they were issued; wildcard receives take the peers in turn.
  MailPeer& peer_of_turn(std::size_t turn) const { return *open_[turn % open_.size()]; }
  void receive(const TransferPtr& transfer);
  bool accepts(const MailPeer& peer) const;
  bool take_unexpected(MailPeer& peer, PostedReceives::iterator posted);
  bool take_one(MailPeer& peer);
  PostedReceives::iterator find(Rank from, uint32_t tag);
  TransferPtr remove_posted(PostedReceives::iterator posted);
  void buffer_unexpected(MailPeer& peer, const Record& record, const std::byte* payload);
  void match(MailPeer& peer, const Record& record, const std::byte* payload,
             const TransferPtr& transfer);
  void flush_replies(MailPeer& peer);
  bool take_fragment(MailPeer& peer);
  void progress_incoming();

  Group& group_;
  const std::shared_ptr<RemotePeers> remote_;
  ForkGuard fork_guard_;  // a forked child must not touch the queues of its parent
  MailArea area_;
  const Rank me_;
  std::mutex mutex_;  // guards the members down to turn_
  Wakeups wakeups_;
  std::vector<std::unique_ptr<MailPeer>> peers_;  // [rank]; null: not open
  std::vector<MailPeer*> open_;
  std::multimap<MatchKey, UnexpectedMessage> unexpected_;  // unexpected-message queue
  PostedReceives posted_;                                  // posted-receive queue
  uint64_t order_ = 0;                                     // sequence number of the next receive
  std::size_t turn_ = 0;  // index in open_ of the peer that a wildcard receive tries first

  std::atomic<uint64_t> requests_{0};
  std::atomic<int> pending_{0};  // transfers that are not done
  std::atomic<int> unready_{0};  // sends in `unready` of a peer
  std::atomic<int> awake_{0};    // waiting threads that do not sleep
  Doorbell standby_doorbell_;    // for threads that sleep while another one is awake
};

}  // namespace pycollect::ipc
