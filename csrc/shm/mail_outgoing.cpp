// See mail_outgoing.h. A message's number pairs it with the answer to it, which comes when the peer
// asks for that message, in any order.
#include "mail_outgoing.h"

#include <algorithm>

#include "../plan/error.h"

namespace pycollect::shm {

Outgoing::Outgoing(const MailArea& area, Rank me, Effects& effects)
    : area_(area), me_(me), effects_(effects), most_whole_(MailArea::most_whole(area.world())) {
  for (Rank to = 0; to < area.world(); ++to)
    peers_.push_back({RingWriter(area.messages(me, to)), RingReader(area.answers(me, to))});
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
  ++peer.sent;
  effects_.touch(transfer->peer());
  if (whole)
    effects_.finish(*transfer);
  else
    peer.unanswered.emplace(record.number, transfer);
  return true;
}

void Outgoing::hear(Peer& peer) {
  const auto lanes = static_cast<uint32_t>(MailArea::lanes(area_.world()));
  while (const Record* const answer = peer.answers.peek()) {
    if (answer->tag >= lanes) throw CollectiveError("an answer of another rank makes no sense");
    const auto asked = peer.unanswered.extract(answer->number);
    if (asked.empty()) {  // it has failed since, with the group
      peer.answers.pop();
      continue;
    }
    const TransferPtr& transfer = asked.mapped();
    if (answer->kind == Record::refusal) {
      const Envelope wanted{answer->bytes, answer->dtype, transfer->envelope.tag};
      effects_.finish(*transfer, mismatch(me_, transfer->envelope, transfer->peer(), wanted));
    } else {
      const LanePlace lane = area_.lane(transfer->peer(), static_cast<int>(answer->tag));
      filling_.push_back({transfer, Flow(lane, answer->bytes, transfer->envelope.bytes)});
    }
    peer.answers.pop();
    effects_.touch(transfer->peer());
  }
}

// As much as is there and there is room for, but not more than one lane, so that a peer that
// empties it as fast as it is filled does not keep the others waiting.
bool Outgoing::fill(Filling& filling) {
  auto& [transfer, flow] = filling;
  const std::byte* const end = transfer->from_ + flow.lane_bytes();
  const auto there = [&] { return transfer->there_ - (transfer->envelope.bytes - flow.left()); };
  while (!flow.done() && transfer->from_ < end && flow.fill(transfer->from_, there()))
    effects_.touch(transfer->peer());
  transfer->set_left(flow.left());
  if (!flow.done()) return false;
  effects_.finish(*transfer);
  return true;
}

void Outgoing::move() {
  for (Peer& peer : peers_) {
    if (!peer.unanswered.empty()) hear(peer);
    while (!peer.queued.empty() && post(peer, peer.queued.front())) peer.queued.pop_front();
  }
  std::erase_if(filling_, [this](Filling& filling) { return fill(filling); });
}

uint64_t Outgoing::missing() const {
  Effects found;
  for (Rank r = 0; r < static_cast<Rank>(peers_.size()); ++r)
    if (!peers_[r].queued.empty() || !peers_[r].unanswered.empty()) found.touch(r);
  for (const Filling& filling : filling_) found.touch(filling.transfer->peer());
  return found.touched;
}

void Outgoing::fail(const std::exception_ptr& error) {
  for (Peer& peer : peers_) {
    for (const auto& [number, transfer] : peer.unanswered) effects_.finish(*transfer, error);
    for (const TransferPtr& transfer : peer.queued) effects_.finish(*transfer, error);
    peer.queued.clear();
    peer.unanswered.clear();
  }
  for (const Filling& filling : filling_) effects_.finish(*filling.transfer, error);
  filling_.clear();
}

}  // namespace pycollect::shm
