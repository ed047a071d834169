// See mailbox_ends.h. A message's number pairs it with its reply, which the peer sends when it has
// matched the message. Replies arrive in any order.
#include <algorithm>

#include "../plan/error.h"
#include "mailbox_ends.h"

namespace pycollect::ipc {

Outgoing::Outgoing(const MailArea& area, Rank me, Wakeups& wakeups)
    : area_(area), me_(me), wakeups_(wakeups), receivers_(area.world()) {
  for (Rank to = 0; !area.is_remote(to); ++to) open(to);
}

void Outgoing::open(Rank to) {
  if (receivers_[to]) return;
  const auto [messages, fragments, replies] = area_.rings(me_, to);
  receivers_[to].reset(
      new DestinationPeer{RingWriter(messages), RingWriter(fragments), RingReader(replies)});
  open_.push_back(receivers_[to].get());
}

void Outgoing::send(TransferPtr transfer) {
  DestinationPeer& peer = *receivers_[transfer->peer()];
  if (!peer.queued.empty() || !post(peer, transfer)) peer.queued.push_back(std::move(transfer));
}

bool Outgoing::post(DestinationPeer& peer, const TransferPtr& transfer) {
  const Envelope& envelope = transfer->envelope;
  const bool whole = envelope.bytes <= MailArea::max_eager_bytes(area_.sharers(transfer->peer()));
  Record record{.number = peer.sent + 1, .bytes = envelope.bytes, .tag = envelope.tag};
  record.dtype = envelope.dtype;
  const bool can_be_direct = transfer->owner_ && area_.is_remote(transfer->peer());
  record.kind = whole ? Record::eager : can_be_direct ? Record::rts_data : Record::rts;
  record.payload = whole ? static_cast<uint32_t>(envelope.bytes) : 0;
  if (!peer.messages.push(record, transfer->buffer_)) return false;
  transfer->number_ = ++peer.sent;
  wakeups_.touch(transfer->peer());
  if (whole)
    wakeups_.finish(*transfer);
  else
    peer.awaiting_cts.emplace(record.number, transfer);
  return true;
}

void Outgoing::read_replies(DestinationPeer& peer) {
  for (; const Record* const reply = peer.replies.peek(); peer.replies.pop()) {
    const auto awaiting = peer.awaiting_cts.extract(reply->number);
    if (awaiting.empty()) continue;  // the send has failed with the group
    const TransferPtr& transfer = awaiting.mapped();
    wakeups_.touch(transfer->peer());
    if (reply->kind == Record::cts_data && area_.is_remote(transfer->peer())) {
      send_directly(peer, transfer);
      continue;
    }
    if (reply->kind != Record::nack) {
      peer.requested.push_back(transfer);
      continue;
    }
    const Envelope wanted{reply->bytes, reply->dtype, transfer->envelope.tag};
    const Rank to = area_.world_rank(transfer->peer());
    const auto why = mismatch(area_.world_rank(me_), transfer->envelope, to, wanted);
    if (!why) throw CollectiveError(text("rank ", to, " refused a message that fits"));
    wakeups_.finish(*transfer, why);
  }
}

void Outgoing::send_directly(DestinationPeer& peer, const TransferPtr& transfer) {
  peer.direct.emplace(transfer->number_, transfer);
  area_.remote().send_data(transfer->peer(), transfer->number_, transfer->buffer_,
                           transfer->envelope.bytes, transfer->owner_);
}

void Outgoing::sent_directly(Rank to, uint64_t number) {
  const auto direct = receivers_[to]->direct.extract(number);
  if (!direct.empty()) wakeups_.finish(*direct.mapped());  // else it has failed with the group
}

bool Outgoing::push_fragment(DestinationPeer& peer, Transfer& transfer) {
  const std::size_t most =
      MailArea::fragment_bytes(area_.sharers(transfer.peer()), transfer.envelope.bytes);
  Record record{.number = transfer.number_, .kind = Record::fragment};
  record.payload = static_cast<uint32_t>(std::min<uint64_t>(transfer.left(), most));
  if (!peer.fragments.push(record, transfer.buffer_ + transfer.moved_)) return false;
  transfer.moved_ += record.payload;
  wakeups_.touch(transfer.peer());
  return true;
}

// Writes the fragments that fit into the ring, in the order of the CTS. Writes at most
// the size of the ring, so that a peer that empties it as fast as it is filled does not starve
// others.
void Outgoing::push_fragments(DestinationPeer& peer) {
  const uint64_t end = peer.fragments.written() + peer.fragments.bytes();
  bool room = true;
  std::erase_if(peer.requested, [&](const TransferPtr& transfer) {
    while (room && transfer->left() != 0)
      room = peer.fragments.written() < end && push_fragment(peer, *transfer);
    if (transfer->left() != 0) return false;
    wakeups_.finish(*transfer);
    return true;
  });
}

void Outgoing::progress() {
  for (DestinationPeer* const peer : open_) {
    if (!peer->awaiting_cts.empty()) read_replies(*peer);
    while (!peer->queued.empty() && post(*peer, peer->queued.front())) peer->queued.pop_front();
    if (!peer->requested.empty()) push_fragments(*peer);
  }
}

void Outgoing::fail(const std::exception_ptr& error) {
  for (DestinationPeer* const peer : open_) {
    for (auto* const waiting : {&peer->awaiting_cts, &peer->direct}) {
      for (const auto& [number, transfer] : *waiting) wakeups_.finish(*transfer, error);
      waiting->clear();
    }
    for (auto* const list : {&peer->queued, &peer->requested}) {
      for (const TransferPtr& transfer : *list) wakeups_.finish(*transfer, error);
      list->clear();
    }
  }
}

}  // namespace pycollect::ipc
