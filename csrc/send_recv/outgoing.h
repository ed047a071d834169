// The sending half of a mailbox: writes messages into the peers' rings in order, queues messages
// that do not fit yet, and writes the fragments of large ones after the receiver's CTS.
// The caller (Mailbox) holds the lock.
#pragma once
#include <deque>
#include <unordered_map>
#include <vector>

#include "mail_area.h"
#include "transfer.h"

namespace pycollect::ipc {

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

}  // namespace pycollect::ipc
