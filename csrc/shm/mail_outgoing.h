// The sending half of a mailbox: puts messages into the peers' rings in order, keeps what does not
// fit there yet, and the pieces of large ones when they are asked for. Not locked: Mailbox does
// that.
#pragma once
#include <deque>
#include <unordered_map>
#include <vector>

#include "mail.h"
#include "mail_area.h"

namespace pycollect::shm {

class Outgoing {
 public:
  Outgoing(const MailArea& area, Rank me, Effects& effects);

  void send(TransferPtr transfer);
  void move();
  void fail(const std::exception_ptr& error);

 private:
  struct Peer {
    RingWriter messages, pieces;
    RingReader answers;
    uint64_t sent = 0;
    std::deque<TransferPtr> queued = {};                        // behind a full ring
    std::unordered_map<uint64_t, TransferPtr> unanswered = {};  // [number]: large ones
    std::deque<TransferPtr> requested = {};                     // of those
  };

  bool post(Peer& peer, const TransferPtr& transfer);
  void hear(Peer& peer);
  bool push_piece(Peer& peer, Transfer& transfer);
  void push_pieces(Peer& peer);

  MailArea area_;
  Rank me_;
  Effects& effects_;
  std::size_t most_whole_;
  std::vector<Peer> peers_;  // [rank]
};

}  // namespace pycollect::shm
