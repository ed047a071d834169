// The receiving half of a mailbox: finds the receive that each message belongs to, keeps messages
// that nobody has asked for yet, and asks for the pieces of large ones. Not locked: Mailbox does
// that. Throws CollectiveError when what a peer has written makes no sense.
//
// A message and a receive belong together when peer and tag are the same, both in the order in
// which they were asked for; receives from anybody take the peers in turn.
#pragma once
#include <compare>
#include <deque>
#include <map>
#include <unordered_map>
#include <vector>

#include "mail.h"
#include "mail_area.h"

namespace pycollect::shm {

class Incoming {
 public:
  // Messages of one peer that are taken without giving the lock to another thread: a peer that
  // never stops sending must not hold up the rest. Takes some 10 us.
  static constexpr int kMostTaken = 100;

  Incoming(const MailArea& area, Rank me, Effects& effects);

  void receive(const TransferPtr& transfer);
  void move();
  void fail(const std::exception_ptr& error);

 private:
  struct Key {
    Rank peer;  // or kAnybody
    uint32_t tag;
    auto operator<=>(const Key&) const = default;
  };
  struct Asked {
    uint64_t order;
    TransferPtr transfer;
  };
  struct Kept {
    Record record;
    std::unique_ptr<std::byte[]> payload;
  };
  struct Answer {
    Record record;
    TransferPtr refused = {};  // the receive that fails when this is said: as long, it is under way
    std::exception_ptr error = {};
  };
  struct Peer {
    RingReader messages, pieces;
    RingWriter answers;
    std::deque<Answer> unsaid = {};  // behind a full ring
    std::size_t kept_bytes = 0;
    int asked = 0;  // receives that wait for a message of this peer's only
    std::unordered_map<uint64_t, TransferPtr> requested = {};  // [number]: large messages
  };
  using Waiting = std::multimap<Key, Asked>;  // equal keys stay in the order of insertion

  int& askers(Rank peer) { return peer == kAnybody ? asked_anybody_ : peers_[peer].asked; }
  bool wants(const Peer& peer) const;
  bool take_kept(Rank from, Waiting::iterator asked);
  bool take_one(Rank from);
  Waiting::iterator find(Rank from, uint32_t tag);
  TransferPtr unlist(Waiting::iterator asked);
  void keep(Rank from, const Record& record, const std::byte* payload);
  void settle(Rank from, const Record& record, const std::byte* payload,
              const TransferPtr& transfer);
  void answer(Rank to, Answer answer);
  void say(Rank to);
  bool take_piece(Rank from);

  MailArea area_;
  Rank me_;
  Effects& effects_;
  std::vector<Peer> peers_;  // [rank]
  std::multimap<Key, Kept> kept_;
  Waiting waiting_;
  uint64_t order_ = 0;  // of the next receive
  int asked_anybody_ = 0;
  Rank turn_ = 0;  // whose message the next receive from anybody takes, if there is one
};

}  // namespace pycollect::shm
