// See mail_incoming.h. Pieces are only of messages that both ends have asked for, so they never
// stay in their ring as long as both ranks move things; and the ring of messages is read for as
// long as somebody waits for what may be in it, whatever else is.
#include "mail_incoming.h"

#include "../plan/error.h"

namespace pycollect::shm {
namespace {

// Messages that nobody has asked for stay in their ring, and a full ring makes their sender wait.
// That sender may be needed for something else first: up to here a ring that fills is emptied
// whoever has asked for what, as long as this rank moves things at all. While a receive is open
// that a message behind them may be for, they are kept however many they are.
constexpr std::size_t kMostKept = 4 << 20;  // bytes of one peer's

// Is as much behind the header as its kind has there?
bool fits(const Record& r) { return r.payload == (r.kind == Record::whole ? r.bytes : 0); }

}  // namespace

Incoming::Incoming(const MailArea& area, Rank me, Effects& effects)
    : area_(area), me_(me), effects_(effects) {
  for (Rank from = 0; from < area.world(); ++from)
    peers_.push_back({RingReader(area.messages(from, me)), RingReader(area.pieces(from, me)),
                      RingWriter(area.answers(from, me))});
}

void Incoming::receive(const TransferPtr& transfer) {
  const Rank peer = transfer->peer();
  const bool anybody = peer == kAnybody;
  const auto asked = waiting_.insert({{peer, transfer->envelope.tag}, {order_++, transfer}});
  ++askers(peer);
  for (int i = 0, turn = turn_; i < (anybody ? area_.world() : 1); ++i) {
    const Rank from = anybody ? (turn + i) % area_.world() : peer;
    if (take_kept(from, asked)) return;
    int taken = 0;
    while (!transfer->matched_ && taken < kMostTaken && take_one(from)) ++taken;
    if (transfer->matched_) return;
    if (taken == kMostTaken) effects_.touch(me_);  // whoever sleeps takes the rest
  }
}

bool Incoming::take_kept(Rank from, Waiting::iterator asked) {
  const auto kept = kept_.lower_bound({from, asked->first.tag});
  if (kept == kept_.end() || kept->first != Key{from, asked->first.tag}) return false;
  const auto [record, payload] = std::move(kept->second);
  kept_.erase(kept);
  peers_[from].kept_bytes -= sizeof(Kept) + record.payload;
  settle(from, record, payload.get(), unlist(asked));
  return true;
}

bool Incoming::wants(const Peer& peer) const {
  if (peer.asked + asked_anybody_ > 0) return true;
  return peer.kept_bytes < kMostKept && peer.messages.crowded();
}

bool Incoming::take_one(Rank from) {
  Peer& peer = peers_[from];
  if (!wants(peer)) return false;
  const Record* const record = peer.messages.peek();
  if (record == nullptr) return false;
  if (!fits(*record)) throw CollectiveError(text("a message of rank ", from, " makes no sense"));
  const auto asked = find(from, record->tag);
  if (asked == waiting_.end())
    keep(from, *record, peer.messages.payload());
  else
    settle(from, *record, peer.messages.payload(), unlist(asked));
  peer.messages.pop();
  effects_.touch(from);
  return true;
}

// The first that asked for it, among those who want it from this peer and those from anybody.
Incoming::Waiting::iterator Incoming::find(Rank from, uint32_t tag) {
  const auto first = [&](Rank peer) {
    const auto at = waiting_.lower_bound({peer, tag});
    return at != waiting_.end() && at->first == Key{peer, tag} ? at : waiting_.end();
  };
  const auto named = first(from);
  const auto anybody = asked_anybody_ > 0 ? first(kAnybody) : waiting_.end();
  if (named == waiting_.end() || anybody == waiting_.end())
    return named == waiting_.end() ? anybody : named;
  return named->second.order < anybody->second.order ? named : anybody;
}

TransferPtr Incoming::unlist(Waiting::iterator asked) {
  TransferPtr transfer = std::move(asked->second.transfer);
  --askers(asked->first.peer);
  waiting_.erase(asked);
  return transfer;
}

void Incoming::keep(Rank from, const Record& record, const std::byte* payload) {
  auto copy = std::make_unique_for_overwrite<std::byte[]>(record.payload);
  std::memcpy(copy.get(), payload, record.payload);
  kept_.emplace(Key{from, record.tag}, Kept{record, std::move(copy)});
  peers_[from].kept_bytes += sizeof(Kept) + record.payload;
}

void Incoming::settle(Rank from, const Record& record, const std::byte* payload,
                      const TransferPtr& transfer) {
  transfer->matched_ = true;
  if (transfer->peer() == kAnybody) turn_ = (from + 1) % area_.world();
  transfer->set_peer(from);
  const Envelope sent{record.bytes, record.dtype, record.tag}, &wanted = transfer->envelope;
  if (sent.bytes != wanted.bytes || sent.dtype != wanted.dtype) {
    const auto error = mismatch(from, sent, me_, wanted);
    if (record.kind == Record::whole) return effects_.finish(*transfer, error);
    Record refusal{.number = record.number, .bytes = wanted.bytes, .kind = Record::refusal};
    refusal.dtype = wanted.dtype;
    answer(from, {refusal, transfer, error});
  } else if (record.kind != Record::whole) {
    peers_[from].requested.emplace(record.number, transfer);
    answer(from, {{.number = record.number, .kind = Record::request}});
  } else {
    if (record.payload != 0) std::memcpy(transfer->into_, payload, record.payload);
    effects_.finish(*transfer);
  }
}

void Incoming::answer(Rank to, Answer answer) {
  peers_[to].unsaid.push_back(std::move(answer));
  say(to);
}

void Incoming::say(Rank to) {
  Peer& peer = peers_[to];
  for (; !peer.unsaid.empty() && peer.answers.push(peer.unsaid.front().record);
       peer.unsaid.pop_front()) {
    const Answer& said = peer.unsaid.front();
    if (said.refused) effects_.finish(*said.refused, said.error);
    effects_.touch(to);
  }
}

bool Incoming::take_piece(Rank from) {
  Peer& peer = peers_[from];
  const Record* const record = peer.pieces.peek();
  if (record == nullptr) return false;
  const auto at = peer.requested.find(record->number);
  if (at != peer.requested.end()) {  // or it has failed since, with the group
    Transfer& transfer = *at->second;
    if (record->payload > transfer.left())
      throw CollectiveError(text("a message of rank ", from, " is longer than it said"));
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
    Peer& peer = peers_[from];
    const uint64_t end = peer.pieces.read() + MailArea::piece_bytes(world);  // see push_pieces
    while (!peer.requested.empty() && peer.pieces.read() < end && take_piece(from)) continue;
    say(from);
  }
}

void Incoming::fail(const std::exception_ptr& error) {
  for (const auto& [key, asked] : waiting_) effects_.finish(*asked.transfer, error);
  waiting_.clear();
  for (Peer& peer : peers_) {
    for (const auto& [number, transfer] : peer.requested) effects_.finish(*transfer, error);
    for (const Answer& answer : peer.unsaid)
      if (answer.refused) effects_.finish(*answer.refused, answer.error);
    peer.unsaid.clear();
    peer.asked = 0;
    peer.requested.clear();
  }
  asked_anybody_ = 0;
}

}  // namespace pycollect::shm
