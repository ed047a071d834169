// See mailbox.h. A message's number pairs it with its reply, which the peer sends when it has
// matched the message. Replies arrive in any order.
#include <algorithm>

#include "../plan/error.h"
#include "mailbox.h"

namespace pycollect::ipc {

void Mailbox::send(MailPeer& peer, const TransferPtr& transfer) {
  if (!transfer->is_ready && peer.unready.empty()) return send_now(peer, transfer);
  peer.unready.push_back(transfer);
  ++unready_;
  send_ready(peer);
  wakeups_.awaited |= awaits_data();  // waiting threads must now poll for this send
}

void Mailbox::send_now(MailPeer& peer, const TransferPtr& transfer) {
  transfer->posted_ = true;
  if (!peer.queued.empty() || !push_message(peer, transfer)) peer.queued.push_back(transfer);
}

// Sends the messages whose data has arrived, in order: a message must not overtake an earlier one
// to the same rank. A device error aborts the group, because the peer may already wait for the
// message, and those behind it are not sent in its place.
void Mailbox::send_ready(MailPeer& peer) {
  for (; !peer.unready.empty(); peer.unready.pop_front(), --unready_) {
    if (!group_.is_healthy()) return;
    const TransferPtr& transfer = peer.unready.front();
    try {
      if (transfer->is_ready && !transfer->is_ready()) return;
    } catch (const std::exception& error) {
      finish(*transfer, std::current_exception());
      group_.abort(text("the device of a rank failed in send: ", error.what()));
      continue;
    }
    send_now(peer, transfer);
  }
}

bool Mailbox::push_message(MailPeer& peer, const TransferPtr& transfer) {
  const Envelope& envelope = transfer->envelope;
  const bool whole = envelope.bytes <= MailArea::max_eager_bytes(sharers(peer.rank));
  const bool can_be_direct = transfer->owner_ && is_remote(peer.rank);
  const Record record{.number = peer.sent + 1,
                      .bytes = envelope.bytes,
                      .tag = envelope.tag,
                      .payload = whole ? static_cast<uint32_t>(envelope.bytes) : 0,
                      .kind = whole           ? Record::eager
                              : can_be_direct ? Record::rts_data
                                              : Record::rts,
                      .dtype = envelope.dtype};
  if (!peer.messages_to.push(record, transfer->buffer_)) return false;
  transfer->number_ = ++peer.sent;
  touch(peer.rank);
  if (whole)
    finish(*transfer);
  else
    peer.awaiting.emplace(record.number, transfer);
  return true;
}

void Mailbox::read_replies(MailPeer& peer) {
  for (; const Record* const reply = peer.replies_from.peek(); peer.replies_from.pop()) {
    const auto awaiting = peer.awaiting.find(reply->number);
    if (awaiting == peer.awaiting.end()) continue;  // the send has failed with the group
    const TransferPtr transfer = awaiting->second;
    touch(peer.rank);
    if (reply->kind == Record::cts_data && is_remote(peer.rank)) {
      remote_->send_data(peer.rank, reply->number, transfer->buffer_, transfer->envelope.bytes,
                         transfer->owner_);
      continue;
    }
    peer.awaiting.erase(awaiting);
    if (reply->kind != Record::nack) {
      peer.cleared.push_back(transfer);
      continue;
    }
    const Envelope wanted{reply->bytes, reply->dtype, transfer->envelope.tag};
    const Rank to = group_.world_rank(peer.rank);
    finish(*transfer, mismatch(group_.world_rank(me_), transfer->envelope, to, wanted));
  }
}

bool Mailbox::push_fragment(MailPeer& peer, Transfer& transfer) {
  const std::size_t most = MailArea::fragment_bytes(sharers(peer.rank), transfer.envelope.bytes);
  Record record{.number = transfer.number_, .kind = Record::fragment};
  record.payload = static_cast<uint32_t>(std::min<uint64_t>(transfer.left(), most));
  if (!peer.fragments_to.push(record, transfer.buffer_ + transfer.moved_)) return false;
  transfer.moved_ += record.payload;
  touch(peer.rank);
  return true;
}

// Writes the fragments that fit into the ring, in the order of the CTS. Writes at most
// the size of the ring, so that a peer that empties it as fast as it is filled does not starve
// others.
void Mailbox::push_fragments(MailPeer& peer) {
  const uint64_t end = peer.fragments_to.written() + peer.fragments_to.bytes();
  bool room = true;
  std::erase_if(peer.cleared, [&](const TransferPtr& transfer) {
    while (room && transfer->left() != 0)
      room = peer.fragments_to.written() < end && push_fragment(peer, *transfer);
    if (transfer->left() != 0) return false;
    finish(*transfer);
    return true;
  });
}

void Mailbox::progress_outgoing() {
  for (MailPeer* const peer : open_) {
    if (!peer->awaiting.empty()) read_replies(*peer);
    send_ready(*peer);
    while (!peer->queued.empty() && push_message(*peer, peer->queued.front()))
      peer->queued.pop_front();
    if (!peer->cleared.empty()) push_fragments(*peer);
  }
}

}  // namespace pycollect::ipc
