// See outgoing.h. A message's number pairs it with its answer, which the peer sends when it
// has matched the message. Answers come in any order.
#include "outgoing.h"

#include <algorithm>

#include "../plan/error.h"

namespace pycollect::shm {

Outgoing::Outgoing(const MailArea& area, Rank me, Wakeups& effects)
    : area_(area), me_(me), effects_(effects), max_eager_(MailArea::max_eager_bytes(area.world())) {
  for (Rank to = 0; to < area.world(); ++to)
    receivers_.push_back({RingWriter(area.messages(me, to)), RingWriter(area.pieces(me, to)),
                          RingReader(area.replies(me, to))});
}

void Outgoing::send(TransferPtr transfer) {
  Receiver& peer = receivers_[transfer->peer()];
  if (!peer.queued.empty() || !post(peer, transfer)) peer.queued.push_back(std::move(transfer));
}

bool Outgoing::post(Receiver& peer, const TransferPtr& transfer) {
  const Envelope& envelope = transfer->envelope;
  const bool whole = envelope.bytes <= max_eager_;
  Record record{.number = peer.sent + 1, .bytes = envelope.bytes, .tag = envelope.tag};
  record.dtype = envelope.dtype;
  record.kind = whole ? Record::eager : Record::rts;
  record.payload = whole ? static_cast<uint32_t>(envelope.bytes) : 0;
  if (!peer.messages.push(record, transfer->from_)) return false;
  transfer->number_ = ++peer.sent;
  effects_.touch(transfer->peer());
  if (whole)
    effects_.finish(*transfer);
  else
    peer.awaiting_cts.emplace(record.number, transfer);
  return true;
}

void Outgoing::read_replies(Receiver& peer) {
  for (; const Record* const answer = peer.replies.peek(); peer.replies.pop()) {
    const auto asked = peer.awaiting_cts.extract(answer->number);
    if (asked.empty()) continue;  // the send has failed since, with the group
    const TransferPtr& transfer = asked.mapped();
    effects_.touch(transfer->peer());
    if (answer->kind != Record::nack) {
      peer.requested.push_back(transfer);
      continue;
    }
    const Envelope wanted{answer->bytes, answer->dtype, transfer->envelope.tag};
    effects_.finish(*transfer, mismatch(me_, transfer->envelope, transfer->peer(), wanted));
  }
}

bool Outgoing::push_fragment(Receiver& peer, Transfer& transfer) {
  const uint64_t moved = transfer.moved();
  const std::size_t most = MailArea::piece(area_.world(), transfer.envelope.bytes);
  Record record{.number = transfer.number_, .kind = Record::fragment};
  record.payload = static_cast<uint32_t>(std::min<uint64_t>(transfer.there_ - moved, most));
  if (!peer.pieces.push(record, transfer.from_ + moved)) return false;
  transfer.move_on(record.payload);
  effects_.touch(transfer.peer());
  return true;
}

// Writes the available fragments that fit, in the order of the requests. Writes at most one ring's
// worth, so that a peer that empties its ring as fast as it is filled does not starve the others.
void Outgoing::push_fragments(Receiver& peer) {
  const uint64_t end = peer.pieces.written() + MailArea::fragment_ring_bytes(area_.world());
  bool room = true;
  std::erase_if(peer.requested, [&](const TransferPtr& transfer) {
    while (room && transfer->moved() < transfer->there_)
      room = peer.pieces.written() < end && push_fragment(peer, *transfer);
    if (transfer->left() != 0) return false;
    effects_.finish(*transfer);
    return true;
  });
}

void Outgoing::move() {
  for (Receiver& peer : receivers_) {
    if (!peer.awaiting_cts.empty()) read_replies(peer);
    while (!peer.queued.empty() && post(peer, peer.queued.front())) peer.queued.pop_front();
    if (!peer.requested.empty()) push_fragments(peer);
  }
}

void Outgoing::fail(const std::exception_ptr& error) {
  for (Receiver& peer : receivers_) {
    for (const auto& [number, transfer] : peer.awaiting_cts) effects_.finish(*transfer, error);
    for (const auto* const list : {&peer.queued, &peer.requested})
      for (const TransferPtr& transfer : *list) effects_.finish(*transfer, error);
    peer.queued.clear();
    peer.awaiting_cts.clear();
    peer.requested.clear();
  }
}

}  // namespace pycollect::shm
