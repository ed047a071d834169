// See incoming.h. Fragments belong to messages that both ends have posted, so they leave their
// ring as long as both ranks make progress. A message ring is read while a receive is posted that
// its messages may match, however many unexpected messages it holds.
#include "incoming.h"

#include "../plan/error.h"

namespace pycollect::shm {
namespace {

// Unexpected messages stay in their ring, and a full ring blocks their sender, which may be needed
// for something else first. So progress empties a ring that fills up and buffers its messages, up
// to this many bytes per peer. While a receive is posted that a later message may match, unexpected
// messages are buffered without a limit.
constexpr std::size_t kMostKept = 4 << 20;

// Returns true if the payload size is the one that the record's kind requires.
bool fits(const Record& r) { return r.payload == (r.kind == Record::eager ? r.bytes : 0); }

}  // namespace

Incoming::Incoming(const MailArea& area, Rank me, Wakeups& effects)
    : area_(area), me_(me), effects_(effects) {
  for (Rank from = 0; from < area.world(); ++from)
    senders_.push_back({RingReader(area.messages(from, me)), RingReader(area.pieces(from, me)),
                        RingWriter(area.replies(from, me))});
}

void Incoming::receive(const TransferPtr& transfer) {
  const Rank peer = transfer->peer();
  const bool wildcard = peer == kAnySource;
  const auto asked = posted_.insert({{peer, transfer->envelope.tag}, {order_++, transfer}});
  ++posted_count(peer);
  for (int i = 0, turn = turn_; i < (wildcard ? area_.world() : 1); ++i) {
    const Rank from = wildcard ? (turn + i) % area_.world() : peer;
    if (take_unexpected(from, asked)) return;
    int taken = 0;
    while (!transfer->matched_ && taken < kMostTaken && take_one(from)) ++taken;
    if (transfer->matched_) return;
    if (taken == kMostTaken) effects_.touch(me_);  // a sleeping thread takes the rest
  }
}

bool Incoming::take_unexpected(Rank from, PostedReceives::iterator asked) {
  const auto kept = unexpected_.lower_bound({from, asked->first.tag});
  if (kept == unexpected_.end() || kept->first != MatchKey{from, asked->first.tag}) return false;
  const auto [record, payload] = std::move(kept->second);
  unexpected_.erase(kept);
  senders_[from].unexpected_bytes -= sizeof(UnexpectedMessage) + record.payload;
  settle(from, record, payload.get(), unlist(asked));
  return true;
}

bool Incoming::wants(const Sender& peer) const {
  if (peer.asked + wildcard_receives_ > 0) return true;
  return peer.unexpected_bytes < kMostKept && peer.messages.crowded();
}

bool Incoming::take_one(Rank from) {
  Sender& peer = senders_[from];
  if (!wants(peer)) return false;
  const Record* const record = peer.messages.peek();
  if (record == nullptr) return false;
  if (!fits(*record))
    throw CollectiveError(text("rank ", from, " wrote an invalid message into the shared memory"));
  const auto asked = find(from, record->tag);
  if (asked == posted_.end())
    buffer_unexpected(from, *record, peer.messages.payload());
  else
    settle(from, *record, peer.messages.payload(), unlist(asked));
  peer.messages.pop();
  effects_.touch(from);
  return true;
}

// Returns the earliest posted receive that matches, naming this peer or any source.
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

TransferPtr Incoming::unlist(PostedReceives::iterator asked) {
  TransferPtr transfer = std::move(asked->second.transfer);
  --posted_count(asked->first.peer);
  posted_.erase(asked);
  return transfer;
}

void Incoming::buffer_unexpected(Rank from, const Record& record, const std::byte* payload) {
  auto copy = std::make_unique_for_overwrite<std::byte[]>(record.payload);
  std::memcpy(copy.get(), payload, record.payload);
  unexpected_.emplace(MatchKey{from, record.tag}, UnexpectedMessage{record, std::move(copy)});
  senders_[from].unexpected_bytes += sizeof(UnexpectedMessage) + record.payload;
}

void Incoming::settle(Rank from, const Record& record, const std::byte* payload,
                      const TransferPtr& transfer) {
  transfer->matched_ = true;
  if (transfer->peer() == kAnySource) turn_ = (from + 1) % area_.world();
  transfer->set_peer(from);
  const Envelope sent{record.bytes, record.dtype, record.tag}, &wanted = transfer->envelope;
  if (sent.bytes != wanted.bytes || sent.dtype != wanted.dtype) {
    const auto error = mismatch(from, sent, me_, wanted);
    if (record.kind == Record::eager) return effects_.finish(*transfer, error);
    Record refusal{.number = record.number, .bytes = wanted.bytes, .kind = Record::nack};
    refusal.dtype = wanted.dtype;
    answer(from, {refusal, transfer, error});
  } else if (record.kind != Record::eager) {
    senders_[from].requested.emplace(record.number, transfer);
    answer(from, {{.number = record.number, .kind = Record::cts}});
  } else {
    if (record.payload != 0) std::memcpy(transfer->into_, payload, record.payload);
    effects_.finish(*transfer);
  }
}

void Incoming::answer(Rank to, Reply answer) {
  senders_[to].queued.push_back(std::move(answer));
  flush_replies(to);
}

void Incoming::flush_replies(Rank to) {
  Sender& peer = senders_[to];
  for (; !peer.queued.empty() && peer.replies.push(peer.queued.front().record);
       peer.queued.pop_front()) {
    const Reply& reply = peer.queued.front();
    if (reply.refused) effects_.finish(*reply.refused, reply.error);
    effects_.touch(to);
  }
}

bool Incoming::take_fragment(Rank from) {
  Sender& peer = senders_[from];
  const Record* const record = peer.pieces.peek();
  if (record == nullptr) return false;
  const auto at = peer.requested.find(record->number);
  if (at != peer.requested.end()) {  // otherwise the receive has failed since, with the group
    Transfer& transfer = *at->second;
    if (record->payload > transfer.left())
      throw CollectiveError(text("rank ", from, " sent more bytes than it announced"));
    std::memcpy(transfer.into_ + transfer.moved(), peer.pieces.payload(), record->payload);
    transfer.move_on(record->payload);
    if (transfer.left() == 0) {
      effects_.finish(transfer);
      peer.requested.erase(at);
    }
  }
  peer.pieces.pop();
  effects_.touch(from);
  return true;
}

void Incoming::move() {
  const int world = area_.world();
  bool taken = true;
  for (int round = 0; taken && round < kMostTaken; ++round) {
    taken = false;
    for (int i = 0, turn = turn_; i < world; ++i) taken |= take_one((turn + i) % world);
  }
  for (Rank from = 0; from < world; ++from) {
    Sender& peer = senders_[from];
    const uint64_t end =
        peer.pieces.read() + MailArea::fragment_ring_bytes(world);  // as in push_pieces
    while (!peer.requested.empty() && peer.pieces.read() < end && take_fragment(from)) continue;
    flush_replies(from);
  }
}

void Incoming::fail(const std::exception_ptr& error) {
  for (const auto& [key, asked] : posted_) effects_.finish(*asked.transfer, error);
  posted_.clear();
  for (Sender& peer : senders_) {
    for (const auto& [number, transfer] : peer.requested) effects_.finish(*transfer, error);
    for (const Reply& answer : peer.queued)
      if (answer.refused) effects_.finish(*answer.refused, answer.error);
    peer.queued.clear();
    peer.asked = 0;
    peer.requested.clear();
  }
  wildcard_receives_ = 0;
}

}  // namespace pycollect::shm
