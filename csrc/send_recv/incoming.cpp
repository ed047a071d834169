// See mailbox.h. A peer sends fragments only after the CTS of a matched receive, so this rank
// can always copy them out of their ring. A message ring is read while a posted receive may match
// one of its messages, and also, within kMostUnexpectedBytes, when it is over half full. Messages
// without a receive then move from the ring to the unexpected-message queue.
#include "../plan/error.h"
#include "mailbox.h"

namespace pycollect::ipc {
namespace {

// Unexpected messages stay in their ring, and a full ring blocks their sender, on which this rank
// may depend for other messages. So progress empties a ring that fills up and buffers its messages,
// up to this many bytes per peer. While a posted receive may match a later message, unexpected
// messages are buffered without a limit.
constexpr std::size_t kMostUnexpectedBytes = 4 << 20;

}  // namespace

void Mailbox::receive(const TransferPtr& transfer) {
  const Rank peer = transfer->peer();
  const bool wildcard = peer == kAnySource;
  const auto posted = posted_.insert({{peer, transfer->envelope.tag}, {order_++, transfer}});
  const std::size_t end = turn_ + (wildcard ? open_.size() : 1);
  for (std::size_t turn = turn_; turn < end; ++turn) {
    MailPeer& from = wildcard ? peer_of_turn(turn) : *peers_[peer];
    if (take_unexpected(from, posted)) return;
    int taken = 0;
    while (!transfer->matched_ && taken < kMostTaken && take_one(from)) ++taken;
    if (transfer->matched_) return;
    if (taken == kMostTaken) touch(me_);  // wakes a thread, which takes the rest
  }
}

bool Mailbox::take_unexpected(MailPeer& peer, PostedReceives::iterator posted) {
  const MatchKey key{peer.rank, posted->first.tag};
  const auto kept = unexpected_.lower_bound(key);
  if (kept == unexpected_.end() || kept->first != key) return false;
  const auto [record, payload] = std::move(kept->second);
  unexpected_.erase(kept);
  peer.unexpected_bytes -= sizeof(UnexpectedMessage) + record.payload;
  match(peer, record, payload.get(), remove_posted(posted));
  return true;
}

bool Mailbox::accepts(const MailPeer& peer) const {
  for (const Rank named : {peer.rank, kAnySource}) {
    const auto first = posted_.lower_bound({named, 0});
    if (first != posted_.end() && first->first.peer == named) return true;
  }
  return peer.unexpected_bytes < kMostUnexpectedBytes && peer.messages_from.crowded();
}

bool Mailbox::take_one(MailPeer& peer) {
  if (!accepts(peer)) return false;
  const Record* const record = peer.messages_from.peek();
  if (record == nullptr) return false;
  const auto posted = find(peer.rank, record->tag);
  if (posted == posted_.end())
    buffer_unexpected(peer, *record, peer.messages_from.payload());
  else
    match(peer, *record, peer.messages_from.payload(), remove_posted(posted));
  peer.messages_from.pop();
  touch(peer.rank);
  return true;
}

// Returns the earliest posted receive that matches: from this peer or from any source.
Mailbox::PostedReceives::iterator Mailbox::find(Rank from, uint32_t tag) {
  const auto first = [&](Rank peer) {
    const auto at = posted_.lower_bound({peer, tag});
    return at != posted_.end() && at->first == MatchKey{peer, tag} ? at : posted_.end();
  };
  const auto named = first(from), wildcard = first(kAnySource);
  if (named == posted_.end() || wildcard == posted_.end())
    return named == posted_.end() ? wildcard : named;
  return named->second.order < wildcard->second.order ? named : wildcard;
}

TransferPtr Mailbox::remove_posted(PostedReceives::iterator posted) {
  TransferPtr transfer = std::move(posted->second.transfer);
  posted_.erase(posted);
  return transfer;
}

void Mailbox::buffer_unexpected(MailPeer& peer, const Record& record, const std::byte* payload) {
  auto copy = std::make_unique_for_overwrite<std::byte[]>(record.payload);
  std::memcpy(copy.get(), payload, record.payload);
  unexpected_.emplace(MatchKey{peer.rank, record.tag}, UnexpectedMessage{record, std::move(copy)});
  peer.unexpected_bytes += sizeof(UnexpectedMessage) + record.payload;
}

void Mailbox::match(MailPeer& peer, const Record& record, const std::byte* payload,
                    const TransferPtr& transfer) {
  transfer->matched_ = true;
  if (transfer->peer() == kAnySource) turn_ = peer.turn + 1;
  transfer->peer_.store(peer.rank, std::memory_order_relaxed);
  const Envelope sent{record.bytes, record.dtype, record.tag}, &wanted = transfer->envelope;
  if (const auto error =
          mismatch(group_.world_rank(peer.rank), sent, group_.world_rank(me_), wanted)) {
    if (record.kind == Record::eager) return finish(*transfer, error);
    Record refusal{.number = record.number, .bytes = wanted.bytes, .kind = Record::nack};
    refusal.dtype = wanted.dtype;
    peer.replies.push_back({refusal, transfer, error});
  } else if (record.kind != Record::eager) {
    peer.requested.emplace(record.number, transfer);
    const bool direct = record.kind == Record::rts_data && transfer->owner_ && is_remote(peer.rank);
    if (direct)
      remote_->receive_data(peer.rank, record.number, transfer->buffer_, wanted.bytes,
                            transfer->owner_);
    const auto kind = direct ? Record::cts_data : Record::cts;
    peer.replies.push_back({{.number = record.number, .kind = kind}});
  } else {
    if (record.payload != 0) std::memcpy(transfer->buffer_, payload, record.payload);
    finish(*transfer);
  }
  flush_replies(peer);
}

void Mailbox::flush_replies(MailPeer& peer) {
  for (; !peer.replies.empty() && peer.replies_to.push(peer.replies.front().record);
       peer.replies.pop_front()) {
    const Reply& reply = peer.replies.front();
    if (reply.refused) finish(*reply.refused, reply.error);
    touch(peer.rank);
  }
}

bool Mailbox::take_fragment(MailPeer& peer) {
  const Record* const record = peer.fragments_from.peek();
  if (record == nullptr) return false;
  const auto at = peer.requested.find(record->number);
  if (at != peer.requested.end()) {  // otherwise the receive has failed with the group
    Transfer& transfer = *at->second;
    std::memcpy(transfer.buffer_ + transfer.moved_, peer.fragments_from.payload(), record->payload);
    transfer.moved_ += record->payload;
    if (transfer.left() == 0) {
      finish(transfer);
      peer.requested.erase(at);
    }
  }
  peer.fragments_from.pop();
  touch(peer.rank);
  return true;
}

void Mailbox::progress_incoming() {
  bool taken = true;
  for (int round = 0; taken && round < kMostTaken; ++round) {
    taken = false;
    for (std::size_t turn = turn_, end = turn_ + open_.size(); turn < end; ++turn)
      taken |= take_one(peer_of_turn(turn));
  }
  for (MailPeer* const peer : open_) {
    RingReader& fragments = peer->fragments_from;
    const uint64_t end = fragments.read() + fragments.bytes();  // as in push_fragments
    while (!peer->requested.empty() && fragments.read() < end && take_fragment(*peer)) continue;
    flush_replies(*peer);
  }
}

}  // namespace pycollect::ipc
