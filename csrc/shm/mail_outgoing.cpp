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

bool Outgoing::post_part(Peer& peer, const Mail& mail) {
  if (!peer.messages.push({.number = mail.number, .kind = Record::part})) return false;
  effects_.touch(mail.peer());
  return true;
}

bool Outgoing::post(Peer& peer, const MailPtr& mail) {
  if (mail->number != 0) return post_part(peer, *mail);
  const Envelope& envelope = mail->envelope;
  const bool whole = !mail->parcel && envelope.bytes <= most_whole_;
  Record record{.number = peer.sent + 1, .bytes = envelope.bytes, .tag = envelope.tag};
  record.dtype = envelope.dtype;
  record.kind = whole ? Record::whole : mail->parcel ? Record::parcel : Record::large;
  record.payload = whole          ? static_cast<uint32_t>(envelope.bytes)
                   : mail->parcel ? static_cast<uint32_t>(sizeof mail->slip)
                                  : 0;
  const auto* const slip = reinterpret_cast<const std::byte*>(mail->slip.data());
  if (!peer.messages.push(record, mail->parcel ? slip : mail->from)) return false;
  ++peer.sent;
  if (mail->parcel) mail->number = record.number;
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
    if (answer->kind == Record::fetched) {
      effects_.finish(*mail);
    } else if (answer->kind == Record::more) {
      effects_.turn(*mail, Mailbox::Turn::more);
      peer.unanswered.emplace(answer->number, mail);
    } else if (answer->kind != Record::refusal) {
      granted(mail, *answer);
    } else {
      const Envelope wanted{answer->bytes, answer->dtype, mail->envelope.tag};
      effects_.finish(*mail, mismatch(me_, mail->envelope, mail->peer(), wanted));
    }
    peer.answers.pop();
    effects_.touch(mail->peer());
  }
}

void Outgoing::granted(const MailPtr& mail, const Record& grant) {
  if (mail->parcel && mail->from == nullptr) {
    mail->vain = grant.kind == Record::bare;
    lent_.push_back({mail, grant});
    return effects_.turn(*mail, Mailbox::Turn::supply);
  }
  const LanePlace lane = area_.lane(mail->peer(), static_cast<int>(grant.tag));
  filling_.push_back({mail, Flow(lane, grant.bytes, mail->envelope.bytes)});
}

void Outgoing::supply(Mail& mail, const std::byte* data) {
  const auto found = std::find_if(lent_.begin(), lent_.end(),
                                  [&](const Lent& lent) { return lent.mail.get() == &mail; });
  if (found == lent_.end()) return;  // it has failed since
  mail.from = data;
  mail.set_turn(Mailbox::Turn::none);
  granted(found->mail, found->grant);
  lent_.erase(found);
}

void Outgoing::send_more(Mail& mail) {
  Peer& peer = peers_[mail.peer()];
  const auto found = peer.unanswered.find(mail.number);
  if (found == peer.unanswered.end()) return;  // it has failed since
  mail.set_turn(Mailbox::Turn::none);
  if (!peer.queued.empty() || !post_part(peer, mail)) peer.queued.push_back(found->second);
}

// As much as there is room for, but not more than one lane, so that a peer that empties it as fast
// as it is filled does not keep the others waiting.
bool Outgoing::fill(Filling& filling) {
  const std::byte* const end = filling.mail->from + filling.flow.lane_bytes();
  while (!filling.flow.done() && filling.mail->from < end && filling.flow.fill(filling.mail->from))
    effects_.touch(filling.mail->peer());
  if (!filling.flow.done()) return false;
  effects_.finish(*filling.mail);
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
  for (const Lent& lent : lent_) found.touch(lent.mail->peer());
  for (const Filling& filling : filling_) found.touch(filling.mail->peer());
  return found.touched;
}

void Outgoing::fail(const std::exception_ptr& error) {
  for (Peer& peer : peers_) {
    for (const auto& [number, mail] : peer.unanswered) effects_.finish(*mail, error);
    for (const MailPtr& mail : peer.queued)  // of parts, the parcels are unanswered
      if (!mail->done()) effects_.finish(*mail, error);
    peer.queued.clear();
    peer.unanswered.clear();
  }
  for (const Lent& lent : lent_) effects_.finish(*lent.mail, error);
  lent_.clear();
  for (const Filling& filling : filling_) effects_.finish(*filling.mail, error);
  filling_.clear();
}

}  // namespace pycollect::shm
