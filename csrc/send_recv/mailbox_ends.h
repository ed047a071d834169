// The two ends of a mailbox's messages. The caller (Mailbox) holds the lock.
#pragma once
#include <compare>
#include <deque>
#include <map>
#include <unordered_map>
#include <vector>

#include "mail_area.h"
#include "transfer.h"

namespace pycollect::ipc {

// Writes messages into the peers' rings in order, queues messages that do not fit yet, and writes
// the fragments of large ones after the receiver's CTS.
class Outgoing {
 public:
  Outgoing(const MailArea& area, Rank me, Wakeups& wakeups);

  // Call before the first message to a rank of another host. May be called repeatedly.
  void open(Rank to);
  void send(TransferPtr transfer);
  void progress();
  void sent_directly(Rank to, uint64_t number);
  void fail(const std::exception_ptr& error);

 private:
  struct DestinationPeer {
    RingWriter messages, fragments;
    RingReader replies;
    uint64_t sent = 0;
    std::deque<TransferPtr> queued = {};                          // sends that wait for room
    std::unordered_map<uint64_t, TransferPtr> awaiting_cts = {};  // [number]: sends without a CTS
    std::deque<TransferPtr> requested = {};                       // large sends that got a CTS
    std::unordered_map<uint64_t, TransferPtr> direct = {};        // [number]: sends past the rings
  };

  bool post(DestinationPeer& peer, const TransferPtr& transfer);
  void read_replies(DestinationPeer& peer);
  void send_directly(DestinationPeer& peer, const TransferPtr& transfer);
  bool push_fragment(DestinationPeer& peer, Transfer& transfer);
  void push_fragments(DestinationPeer& peer);

  MailArea area_;
  Rank me_;
  Wakeups& wakeups_;
  std::vector<std::unique_ptr<DestinationPeer>> receivers_;  // [rank]; null: not open
  std::vector<DestinationPeer*> open_;
};

// Matches messages with receives, buffers unexpected messages, and requests the fragments of large
// ones (CTS). Throws CollectiveError when a peer has written an invalid record.
//
// A message matches a receive when peer and tag are equal. Messages and receives match in the order
// in which they were issued; wildcard receives take the peers in turn.
class Incoming {
 public:
  // Messages taken from one peer before the lock is released, so that a peer that never stops
  // sending does not hold up other threads. Taking them lasts about 10 us.
  static constexpr int kMostTaken = 100;

  Incoming(const MailArea& area, Rank me, Wakeups& wakeups);

  // Call before the first message from a rank of another host. May be called repeatedly.
  void open(Rank from);
  // A receive from any source is from the open peers.
  void receive(const TransferPtr& transfer);
  void progress();
  void received_directly(Rank from, uint64_t number);
  void fail(const std::exception_ptr& error);

 private:
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
  struct SourcePeer {
    RingReader messages, fragments;
    RingWriter replies;
    std::size_t turn;               // index in open_
    std::deque<Reply> queued = {};  // replies that wait for room in the ring
    std::size_t unexpected_bytes = 0;
    int posted = 0;  // posted receives that name this peer
    // [number of the message]: receives for which a CTS was sent or is queued.
    std::unordered_map<uint64_t, TransferPtr> requested = {};
  };
  using PostedReceives =
      std::multimap<MatchKey, PostedReceive>;  // equal keys stay in the order of insertion

  int& posted_count(Rank peer) {
    return peer == kAnySource ? wildcard_receives_ : senders_[peer]->posted;
  }
  Rank peer_of_turn(std::size_t turn) const { return open_[turn % open_.size()]; }
  bool wants(const SourcePeer& peer) const;
  bool take_unexpected(Rank from, PostedReceives::iterator posted);
  bool take_one(Rank from);
  PostedReceives::iterator find(Rank from, uint32_t tag);
  TransferPtr remove_posted(PostedReceives::iterator posted);
  void buffer_unexpected(Rank from, const Record& record, const std::byte* payload);
  void match(Rank from, const Record& record, const std::byte* payload,
             const TransferPtr& transfer);
  void reply(Rank to, Reply reply);
  void flush_replies(Rank to);
  bool take_fragment(Rank from);

  MailArea area_;
  Rank me_;
  Wakeups& wakeups_;
  std::vector<std::unique_ptr<SourcePeer>> senders_;  // [rank]; null: not open
  std::vector<Rank> open_;
  std::multimap<MatchKey, UnexpectedMessage> unexpected_;  // unexpected-message queue
  PostedReceives posted_;                                  // posted-receive queue
  uint64_t order_ = 0;                                     // sequence number of the next receive
  int wildcard_receives_ = 0;                              // posted wildcard receives
  std::size_t turn_ = 0;  // index in open_ of the peer that a wildcard receive tries first
};

}  // namespace pycollect::ipc
