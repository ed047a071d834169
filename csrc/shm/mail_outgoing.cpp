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

void Outgoing::send(MailPtr mail) {
  Peer& peer = peers_[mail->peer()];
  if (!peer.queued.empty() || !post(peer, mail)) peer.queued.push_back(std::move(mail));
}

bool Outgoing::post(Peer& peer, const MailPtr& mail) {
  const Envelope& envelope = mail->envelope;
  const bool whole = envelope.bytes <= most_whole_;
  Record record{.number = peer.sent + 1, .bytes = envelope.bytes, .tag = envelope.tag};
  record.dtype = envelope.dtype;
  record.kind = whole ? Record::whole : Record::large;
  record.payload = whole ? static_cast<uint32_t>(envelope.bytes) : 0;
  if (!peer.messages.push(record, mail->from)) return false;
  ++peer.sent;
  effects_.touch(mail->peer());
  if (whole)
    effects_.finish(*mail);
  else
    peer.unanswered.emplace(record.number, mail);
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
    const MailPtr& mail = asked.mapped();
    if (answer->kind == Record::refusal) {
      const Envelope wanted{answer->bytes, answer->dtype, mail->envelope.tag};
      effects_.finish(*mail, mismatch(me_, mail->envelope, mail->peer(), wanted));
    } else {
      const LanePlace lane = area_.lane(mail->peer(), static_cast<int>(answer->tag));
      filling_.push_back({mail, Flow(lane, answer->bytes, mail->envelope.bytes)});
    }
    peer.answers.pop();
    effects_.touch(mail->peer());
  }
}

// As much as is there and there is room for, but not more than one lane, so that a peer that
// empties it as fast as it is filled does not keep the others waiting.
bool Outgoing::fill(Filling& filling) {
  auto& [mail, flow] = filling;
  const std::byte* const end = mail->from + flow.lane_bytes();
  const auto there = [&] { return mail->there - (mail->envelope.bytes - flow.left()); };
  while (!flow.done() && mail->from < end && flow.fill(mail->from, there()))
    effects_.touch(mail->peer());
  mail->set_moved(mail->envelope.bytes - flow.left());
  if (!flow.done()) return false;
  effects_.finish(*mail);
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
  for (const Filling& filling : filling_) found.touch(filling.mail->peer());
  return found.touched;
}

void Outgoing::fail(const std::exception_ptr& error) {
  for (Peer& peer : peers_) {
    for (const auto& [number, mail] : peer.unanswered) effects_.finish(*mail, error);
    for (const MailPtr& mail : peer.queued) effects_.finish(*mail, error);
    peer.queued.clear();
    peer.unanswered.clear();
  }
  for (const Filling& filling : filling_) effects_.finish(*filling.mail, error);
  filling_.clear();
}

}  // namespace pycollect::shm
