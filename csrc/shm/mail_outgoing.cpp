// See mail_outgoing.h. A message's number pairs it with the answer to it, which comes when the peer
// asks for that message, in any order.
#include "mail_outgoing.h"

#include <algorithm>

#include "../plan/error.h"

namespace pycollect::shm {

Outgoing::Outgoing(const MailArea& area, Rank me, Effects& effects)
    : area_(area), me_(me), effects_(effects), most_whole_(MailArea::most_whole(area.world())) {
  for (Rank to = 0; to < area.world(); ++to)
    peers_.push_back({RingWriter(area.messages(me, to)), RingWriter(area.pieces(me, to)),
                      RingReader(area.answers(me, to))});
}

void Outgoing::send(TransferPtr transfer) {
  Peer& peer = peers_[transfer->peer()];
  if (!peer.queued.empty() || !post(peer, transfer)) peer.queued.push_back(std::move(transfer));
}

bool Outgoing::post(Peer& peer, const TransferPtr& transfer) {
  const Envelope& envelope = transfer->envelope;
  const bool whole = envelope.bytes <= most_whole_;
  Record record{.number = peer.sent + 1, .bytes = envelope.bytes, .tag = envelope.tag};
  record.dtype = envelope.dtype;
  record.kind = whole ? Record::whole : Record::large;
  record.payload = whole ? static_cast<uint32_t>(envelope.bytes) : 0;
  if (!peer.messages.push(record, transfer->from_)) return false;
  transfer->number_ = ++peer.sent;
  effects_.touch(transfer->peer());
  if (whole)
    effects_.finish(*transfer);
  else
    peer.unanswered.emplace(record.number, transfer);
  return true;
}

void Outgoing::hear(Peer& peer) {
  for (; const Record* const answer = peer.answers.peek(); peer.answers.pop()) {
    const auto asked = peer.unanswered.extract(answer->number);
    if (asked.empty()) continue;  // it has failed since, with the group
    const TransferPtr& transfer = asked.mapped();
    effects_.touch(transfer->peer());
    if (answer->kind != Record::refusal) {
      peer.requested.push_back(transfer);
      continue;
    }
    const Envelope wanted{answer->bytes, answer->dtype, transfer->envelope.tag};
    effects_.finish(*transfer, mismatch(me_, transfer->envelope, transfer->peer(), wanted));
  }
}

bool Outgoing::push_piece(Peer& peer, Transfer& transfer) {
  const uint64_t moved = transfer.moved();
  const std::size_t most = MailArea::piece(area_.world(), transfer.envelope.bytes);
  Record record{.number = transfer.number_, .kind = Record::piece};
  record.payload = static_cast<uint32_t>(std::min<uint64_t>(transfer.there_ - moved, most));
  if (!peer.pieces.push(record, transfer.from_ + moved)) return false;
  transfer.move_on(record.payload);
  effects_.touch(transfer.peer());
  return true;
}

// As much as is there and there is room for, in the order of the requests, but not more than a
// ring, so that a peer that empties it as fast as it is filled does not keep the others waiting.
void Outgoing::push_pieces(Peer& peer) {
  const uint64_t end = peer.pieces.written() + MailArea::piece_bytes(area_.world());
  bool room = true;
  std::erase_if(peer.requested, [&](const TransferPtr& transfer) {
    while (room && transfer->moved() < transfer->there_)
      room = peer.pieces.written() < end && push_piece(peer, *transfer);
    if (transfer->left() != 0) return false;
    effects_.finish(*transfer);
    return true;
  });
}

void Outgoing::move() {
  for (Peer& peer : peers_) {
    if (!peer.unanswered.empty()) hear(peer);
    while (!peer.queued.empty() && post(peer, peer.queued.front())) peer.queued.pop_front();
    if (!peer.requested.empty()) push_pieces(peer);
  }
}

void Outgoing::fail(const std::exception_ptr& error) {
  for (Peer& peer : peers_) {
    for (const auto& [number, transfer] : peer.unanswered) effects_.finish(*transfer, error);
    for (const auto* const list : {&peer.queued, &peer.requested})
      for (const TransferPtr& transfer : *list) effects_.finish(*transfer, error);
    peer.queued.clear();
    peer.unanswered.clear();
    peer.requested.clear();
  }
}

}  // namespace pycollect::shm
