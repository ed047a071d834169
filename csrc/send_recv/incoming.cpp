// See mailbox_ends.h. A peer sends fragments only after the CTS of a matched receive, so this rank
// can always copy them out of their ring. A message ring is read while a posted receive may match
// one of its messages, and also, within kMostUnexpectedBytes, when it is over half full. Messages
// without a receive then move from the ring to the unexpected-message queue.
#include "../plan/error.h"
#include "mailbox_ends.h"

namespace pycollect::ipc {
namespace {

// Unexpected messages stay in their ring, and a full ring blocks their sender, on which this rank
// may depend for other messages. So progress empties a ring that fills up and buffers its messages,
// up to this many bytes per peer. While a posted receive may match a later message, unexpected
// messages are buffered without a limit.
constexpr std::size_t kMostUnexpectedBytes = 4 << 20;

// Returns true if the payload size is the one that the record's kind requires.
bool fits(const Record& r) { return r.payload == (r.kind == Record::eager ? r.bytes : 0); }

}  // namespace

Incoming::Incoming(const MailArea& area, Rank me, Wakeups& wakeups)
    : area_(area), me_(me), wakeups_(wakeups), senders_(area.world()) {
  for (Rank from = 0; !area.is_remote(from); ++from) open(from);
}

void Incoming::open(Rank from) {
  if (senders_[from]) return;
  const auto [messages, fragments, replies] = area_.rings(from, me_);
  senders_[from].reset(new SourcePeer{RingReader(messages), RingReader(fragments),
                                      RingWriter(replies), open_.size()});
  open_.push_back(from);
}

void Incoming::receive(const TransferPtr& transfer) {
  const Rank peer = transfer->peer();
  const bool wildcard = peer == kAnySource;
  const auto posted = posted_.insert({{peer, transfer->envelope.tag}, {order_++, transfer}});
  ++posted_count(peer);
  const std::size_t end = turn_ + (wildcard ? open_.size() : 1);
  for (std::size_t turn = turn_; turn < end; ++turn) {
    const Rank from = wildcard ? peer_of_turn(turn) : peer;
    if (take_unexpected(from, posted)) return;
    int taken = 0;
    while (!transfer->matched_ && taken < kMostTaken && take_one(from)) ++taken;
    if (transfer->matched_) return;
    if (taken == kMostTaken) wakeups_.touch(me_);  // wakes a thread, which takes the rest
  }
}

bool Incoming::take_unexpected(Rank from, PostedReceives::iterator posted) {
  const auto kept = unexpected_.lower_bound({from, posted->first.tag});
  if (kept == unexpected_.end() || kept->first != MatchKey{from, posted->first.tag}) return false;
  const auto [record, payload] = std::move(kept->second);
  unexpected_.erase(kept);
  senders_[from]->unexpected_bytes -= sizeof(UnexpectedMessage) + record.payload;
  match(from, record, payload.get(), remove_posted(posted));
  return true;
}

bool Incoming::wants(const SourcePeer& peer) const {
  if (peer.posted + wildcard_receives_ > 0) return true;
  return peer.unexpected_bytes < kMostUnexpectedBytes && peer.messages.crowded();
}

bool Incoming::take_one(Rank from) {
  SourcePeer& peer = *senders_[from];
  if (!wants(peer)) return false;
  const Record* const record = peer.messages.peek();
  if (record == nullptr) return false;
  if (!fits(*record))
    throw CollectiveError(
        text("rank ", area_.world_rank(from), " wrote an invalid message into the shared memory"));
  const auto posted = find(from, record->tag);
  if (posted == posted_.end())
    buffer_unexpected(from, *record, peer.messages.payload());
  else
    match(from, *record, peer.messages.payload(), remove_posted(posted));
  peer.messages.pop();
  wakeups_.touch(from);
  return true;
}

// Returns the earliest posted receive that matches: from this peer or from any source.
Incoming::PostedReceives::iterator Incoming::find(Rank from, uint32_t tag) {
  const auto first = [&](Rank peer) {
    const auto at = posted_.lower_bound({peer, tag});
    return at != posted_.end() && at->first == MatchKey{peer, tag} ? at : posted_.end();
  };
  const auto named = first(from);
  const auto wildcard = wildcard_receives_ > 0 ? first(kAnySource) : posted_.end();
  if (named == posted_.end() || wildcard == posted_.end())
    return named == posted_.end() ? wildcard : named;
  return named->second.order < wildcard->second.order ? named : wildcard;
}

TransferPtr Incoming::remove_posted(PostedReceives::iterator posted) {
  TransferPtr transfer = std::move(posted->second.transfer);
  --posted_count(posted->first.peer);
  posted_.erase(posted);
  return transfer;
}

void Incoming::buffer_unexpected(Rank from, const Record& record, const std::byte* payload) {
  auto copy = std::make_unique_for_overwrite<std::byte[]>(record.payload);
  std::memcpy(copy.get(), payload, record.payload);
  unexpected_.emplace(MatchKey{from, record.tag}, UnexpectedMessage{record, std::move(copy)});
  senders_[from]->unexpected_bytes += sizeof(UnexpectedMessage) + record.payload;
}

void Incoming::match(Rank from, const Record& record, const std::byte* payload,
                     const TransferPtr& transfer) {
  transfer->matched_ = true;
  if (transfer->peer() == kAnySource) turn_ = senders_[from]->turn + 1;
  transfer->set_peer(from);
  const Envelope sent{record.bytes, record.dtype, record.tag}, &wanted = transfer->envelope;
  if (const auto error = mismatch(area_.world_rank(from), sent, area_.world_rank(me_), wanted)) {
    if (record.kind == Record::eager) return wakeups_.finish(*transfer, error);
    Record refusal{.number = record.number, .bytes = wanted.bytes, .kind = Record::nack};
    refusal.dtype = wanted.dtype;
    reply(from, {refusal, transfer, error});
  } else if (record.kind != Record::eager) {
    senders_[from]->requested.emplace(record.number, transfer);
    const bool direct =
        record.kind == Record::rts_data && transfer->owner_ && area_.is_remote(from);
    if (direct)
      area_.remote().receive_data(from, record.number, transfer->buffer_, wanted.bytes,
                                  transfer->owner_);
    reply(from, {{.number = record.number, .kind = direct ? Record::cts_data : Record::cts}});
  } else {
    if (record.payload != 0) std::memcpy(transfer->buffer_, payload, record.payload);
    wakeups_.finish(*transfer);
  }
}

void Incoming::reply(Rank to, Reply reply) {
  senders_[to]->queued.push_back(std::move(reply));
  flush_replies(to);
}

void Incoming::flush_replies(Rank to) {
  SourcePeer& peer = *senders_[to];
  for (; !peer.queued.empty() && peer.replies.push(peer.queued.front().record);
       peer.queued.pop_front()) {
    const Reply& reply = peer.queued.front();
    if (reply.refused) wakeups_.finish(*reply.refused, reply.error);
    wakeups_.touch(to);
  }
}

bool Incoming::take_fragment(Rank from) {
  SourcePeer& peer = *senders_[from];
  const Record* const record = peer.fragments.peek();
  if (record == nullptr) return false;
  const auto at = peer.requested.find(record->number);
  if (at != peer.requested.end()) {  // otherwise the receive has failed with the group
    Transfer& transfer = *at->second;
    if (record->payload > transfer.left())
      throw CollectiveError(
          text("rank ", area_.world_rank(from), " sent more bytes than its RTS declares"));
    std::memcpy(transfer.buffer_ + transfer.moved_, peer.fragments.payload(), record->payload);
    transfer.moved_ += record->payload;
    if (transfer.left() == 0) {
      wakeups_.finish(transfer);
      peer.requested.erase(at);
    }
  }
  peer.fragments.pop();
  wakeups_.touch(from);
  return true;
}

void Incoming::received_directly(Rank from, uint64_t number) {
  const auto requested = senders_[from]->requested.extract(number);
  if (!requested.empty()) wakeups_.finish(*requested.mapped());
}

void Incoming::progress() {
  bool taken = true;
  for (int round = 0; taken && round < kMostTaken; ++round) {
    taken = false;
    for (std::size_t turn = turn_, end = turn_ + open_.size(); turn < end; ++turn)
      taken |= take_one(peer_of_turn(turn));
  }
  for (const Rank from : open_) {
    SourcePeer& peer = *senders_[from];
    const uint64_t end = peer.fragments.read() + peer.fragments.bytes();  // as in push_fragments
    while (!peer.requested.empty() && peer.fragments.read() < end && take_fragment(from)) continue;
    flush_replies(from);
  }
}

void Incoming::fail(const std::exception_ptr& error) {
  for (const auto& [key, posted] : posted_) wakeups_.finish(*posted.transfer, error);
  posted_.clear();
  for (const Rank from : open_) {
    SourcePeer& peer = *senders_[from];
    for (const auto& [number, transfer] : peer.requested) wakeups_.finish(*transfer, error);
    for (const Reply& reply : peer.queued)
      if (reply.refused) wakeups_.finish(*reply.refused, reply.error);
    peer.queued.clear();
    peer.posted = 0;
    peer.requested.clear();
  }
  wildcard_receives_ = 0;
}

}  // namespace pycollect::ipc
