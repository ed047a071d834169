// See mailbox.h: posts transfers, makes progress under a lock, and waits.
#include "mailbox.h"

#include <algorithm>
#include <bit>

#include "../plan/dtype.h"
#include "../plan/error.h"

namespace pycollect::ipc {
namespace {

std::string name(const Envelope& envelope) {
  const bool known = envelope.dtype < kAllDTypeNames.size();
  const std::string dtype =
      known ? kAllDTypeNames[envelope.dtype] : text("dtype ", int{envelope.dtype});
  return text(envelope.bytes, " bytes of ", dtype);
}

}  // namespace

std::exception_ptr mismatch(Rank from, const Envelope& sent, Rank to, const Envelope& wanted) {
  if (sent.bytes == wanted.bytes && sent.dtype == wanted.dtype) return nullptr;
  return std::make_exception_ptr(std::invalid_argument(
      text("rank ", from, " sent ", name(sent), " with tag ", sent.tag, " to rank ", to,
           ", which posted a receive of ", name(wanted), ": bytes and dtype must be equal")));
}

Mailbox::Mailbox(Group& group, std::shared_ptr<RemotePeers> remote)
    : group_(group),
      remote_(std::move(remote)),
      area_(group),
      me_(group.rank()),
      peers_(group.all_ranks()) {
  for (Rank r = 0; r < group.world(); ++r) open(r);
  if (remote_) remote_->attach(*this);
}

// A group over hosts is aborted when one of its ranks ends, although no rank waits for it. What
// that rank has sent before can be received nevertheless.
void Mailbox::post(const TransferPtr& transfer) {
  const OpContext context{transfer->receives ? "recv" : "send", ++requests_, Deadline::max()};
  const bool may_have_arrived =
      remote_ && transfer->receives && !group_.is_healthy() && !fork_guard_.forked();
  if (!may_have_arrived) group_.require_healthy(context);
  Locked locked(mutex_);
  if (!may_have_arrived) group_.require_healthy(context);  // a send before this one may have failed
  const Rank peer = transfer->peer();
  open(peer);
  ++pending_;
  transfer->posted_ = transfer->receives;  // a send: once its data is there
  guard([&] { transfer->receives ? receive(transfer) : send(*peers_[peer], transfer); });
  unlock(std::move(locked));
  if (!may_have_arrived || drain({.holds = [&] { return transfer->done(); }, .missing = {}}))
    return;
  try {
    group_.require_healthy(context);
  } catch (const CollectiveError&) {
    fail(std::current_exception());
    throw;
  }
}

void Mailbox::open(Rank peer) {
  if (peer == kAnySource)
    for (Rank r = group_.world(); r < group_.all_ranks(); ++r) open(r);
  if (peer == kAnySource || peers_[peer]) return;
  if (is_remote(peer)) remote_->open(peer);
  const auto rings = [&](bool outgoing) {
    if (is_remote(peer)) return MailArea::remote_rings(remote_->rings(peer, outgoing));
    return outgoing ? area_.rings(me_, peer) : area_.rings(peer, me_);
  };
  const auto to = rings(true), from = rings(false);
  const RingWriter messages(to.messages), fragments(to.fragments), replies(from.replies);
  peers_[peer].reset(new MailPeer{peer, open_.size(), messages, fragments, replies,
                                  RingReader(from.messages), RingReader(from.fragments),
                                  RingReader(to.replies)});
  open_.push_back(peers_[peer].get());
}

void Mailbox::touch(Rank r) {
  std::vector<Rank>& publish = wakeups_.publish;
  if (!is_remote(r))
    wakeups_.touched |= uint64_t{1} << r;
  else if (std::ranges::find(publish, r) == publish.end())
    publish.push_back(r);
}

void Mailbox::finish(Transfer& transfer, std::exception_ptr error) {
  wakeups_.awaited |= transfer.finish(std::move(error));
  ++wakeups_.finished;
}

// Unlocks the mailbox, then rings the doorbells: a wake-up takes time, and the woken thread needs
// the lock.
bool Mailbox::unlock(Locked locked) {
  const Wakeups wakeups = std::exchange(wakeups_, {});
  pending_.fetch_sub(wakeups.finished, std::memory_order_acq_rel);
  locked.unlock();
  for (uint64_t left = wakeups.touched; left != 0; left &= left - 1)
    area_.doorbell(std::countr_zero(left)).ring();
  for (const Rank r : wakeups.publish) remote_->publish(r);
  if (wakeups.awaited) wake();
  return wakeups.touched != 0 || !wakeups.publish.empty() || wakeups.finished != 0;
}

// Runs `act` under the lock. An invalid record of a peer or an allocation failure aborts the group
// and fails all transfers, so that no transfer stays queued after its caller got an error.
template <class Act>
void Mailbox::guard(const Act& act) {
  try {
    act();
  } catch (const std::exception& error) {
    group_.abort(error.what());
    fail_locked(std::current_exception());
  }
}

void Mailbox::hello(Rank from) {
  const Locked locked(mutex_);
  open(from);
}

void Mailbox::moved_directly(Rank peer, bool sent, uint64_t number) {
  Locked locked(mutex_);
  auto& waiting = sent ? peers_[peer]->awaiting : peers_[peer]->requested;
  const auto moved = waiting.extract(number);
  if (!moved.empty()) finish(*moved.mapped());  // else it has failed with the group
  unlock(std::move(locked));
}

bool Mailbox::progress_locked(Locked locked) {
  guard([this] {
    progress_incoming();  // first: no CTS waits behind the data of a large message
    progress_outgoing();
  });
  return unlock(std::move(locked));
}

bool Mailbox::progress() {
  if (fork_guard_.forked()) return false;
  Locked locked(mutex_, std::try_to_lock);
  return locked && progress_locked(std::move(locked));
}

void Mailbox::fail_locked(const std::exception_ptr& error) {
  for (const auto& [key, posted] : posted_) finish(*posted.transfer, error);
  posted_.clear();
  unready_ = 0;
  for (MailPeer* const peer : open_) {
    for (auto* const list : {&peer->unready, &peer->queued, &peer->cleared}) {
      for (const TransferPtr& transfer : *list) finish(*transfer, error);
      list->clear();
    }
    for (auto* const list : {&peer->awaiting, &peer->requested}) {
      for (const auto& [number, transfer] : *list) finish(*transfer, error);
      list->clear();
    }
    for (const Reply& reply : peer->replies)
      if (reply.refused) finish(*reply.refused, reply.error);
    peer->replies.clear();
  }
}

void Mailbox::fail(const std::exception_ptr& error) {
  if (fork_guard_.forked()) return;
  Locked locked(mutex_);
  fail_locked(error);
  unlock(std::move(locked));
}

void Mailbox::fail_unready(const std::exception_ptr& error) {
  if (fork_guard_.forked()) return;
  Locked locked(mutex_);
  for (MailPeer* const peer : open_)
    for (; !peer->unready.empty(); peer->unready.pop_front(), --unready_)
      finish(*peer->unready.front(), error);
  unlock(std::move(locked));
}

void Mailbox::wake() {
  area_.doorbell(me_).ring();
  standby_doorbell_.ring();
}

// The wait of one thread. While at least one waiting thread is awake, it makes progress for the
// rank. The other threads sleep on a doorbell that no peer rings, and wake only for their own
// transfer: if peers woke a second thread as well, messages of 64 KiB would take 1.4 times as long,
// and messages of 64 bytes twice as long.
class Mailbox::Waiter {
 public:
  Waiter(Mailbox& box, const WaitCondition& until) : box_(box), until_(until) { ++box_.awake_; }
  ~Waiter() { --box_.awake_; }

  // After a fragment has moved, another one follows soon. The thread waits for it without yielding
  // the core, because another thread would keep the core for much longer than a fragment takes.
  bool is_over() {
    if (until_.holds()) return true;
    if (!advance()) return false;
    const auto step = [this] { return until_.holds() || advance(); };
    for (const auto begin = moved_; !until_.holds() && moved_ - begin < kCheckInterval;)
      if (!box_.group_.spin_for(step)) break;
    return until_.holds();
  }
  // The last stage of a wait, called repeatedly after spinning and yielding.
  void back_off() {
    const auto begin = Clock::now();
    for (auto now = begin; now - moved_ < box_.group_.settings().yield_time; now = Clock::now()) {
      if (is_over() || now - begin > kCheckInterval) return;
      sched_yield();
    }
    sleep();
  }

 private:
  bool advance() {
    if (!box_.progress()) return false;
    moved_ = Clock::now();
    return true;
  }
  void sleep();

  Mailbox& box_;
  const WaitCondition& until_;
  Clock::time_point moved_ = Clock::now();  // time of the last progress
  std::chrono::microseconds next_{1'000};
};

// Before a thread sleeps it takes the lock and makes progress itself, in case a message arrived
// after another thread had checked for it. A thread that sleeps while another is awake wakes after
// a millisecond, in case it must make progress now.
void Mailbox::Waiter::sleep() {
  // A poll every kPollInterval costs a tenth of the exchange of a small message through the host.
  constexpr std::chrono::microseconds kPollInterval{50}, kStandbySleep{1'000}, kLongest{10'000};
  const auto busy = [&] {
    const bool moved = box_.progress_locked(Locked(box_.mutex_));
    if (moved) moved_ = Clock::now();
    return moved || until_.holds();
  };
  const auto at_most = [&](auto interval) {
    return [&, interval] { return box_.awaits_data() ? kPollInterval : interval; };
  };
  if (until_.transfer != nullptr) until_.transfer->count_sleeper(1);
  if (--box_.awake_ == 0) {
    box_.area_.doorbell(box_.me_).sleep(at_most(next_), busy);
    next_ = std::min(2 * next_, kLongest);
  } else {
    box_.standby_doorbell_.sleep(at_most(kStandbySleep), busy);
  }
  ++box_.awake_;
  if (until_.transfer != nullptr) until_.transfer->count_sleeper(-1);
}

// Makes progress until nothing moves, up to a bound, because live ranks may go on sending.
// Returns true if `until` held meanwhile.
bool Mailbox::drain(const WaitCondition& until) {
  const std::size_t ring = MailArea::message_bytes(sharers(group_.all_ranks() - 1));
  for (int n = ring / detail::kRecordUnit / kMostTaken + 1; n >= 0; --n) {
    if (until.holds()) return true;
    if (!progress_locked(Locked(mutex_))) break;
  }
  return false;
}

// Returns the ranks without which the condition cannot hold. A rank that died or left may have sent
// its messages before. They are in the memory: `drain` receives them, while `is_over` leaves them
// to the thread that holds the lock. Ranks may leave meanwhile after sending, so a rank counts only
// if it was missing before and after.
std::vector<Rank> Mailbox::needed(const WaitCondition& until) {
  const std::vector<Rank> before = until.missing();
  if (drain(until)) return {};
  std::vector<Rank> missing = until.missing();
  std::erase_if(missing, [&](Rank r) { return !std::ranges::count(before, r); });
  return missing;
}

// Throws if the wait depends on a rank of another host that is gone, or late.
void Mailbox::check_remote(const WaitCondition& until, const OpContext& context) {
  if (!remote_) return;
  const bool late = Clock::now() >= context.deadline;
  if (!late && !remote_->any_gone()) return;
  std::vector<Rank> gone;  // before `needed` takes what these ranks have sent
  for (Rank r = group_.world(); r < group_.all_ranks(); ++r)
    if (is_gone(r)) gone.push_back(r);
  const std::vector<Rank> missing = needed(until);
  const auto lost = std::ranges::find_first_of(missing, gone);
  if (lost != missing.end()) remote_->fail(*lost, false, context);
  if (late && missing.size() == 1 && is_remote(missing.front()))
    remote_->fail(missing.front(), true, context);
}

void Mailbox::wait(const WaitCondition& until, const OpContext& context) {
  if (until.holds()) return;
  Waiter waiter(*this, until);
  try {
    group_.require_healthy(context);
    group_.await([&] { return waiter.is_over(); },
                 {.missing = [&] { return needed(until); },
                  .check = [&] { check_remote(until, context); },
                  .back_off = [&] { waiter.back_off(); }},
                 context);
  } catch (const CollectiveError&) {  // what a peer sent before the failure is in the memory
    const std::exception_ptr error = std::current_exception();
    if (drain(until)) return;
    fail(error);
    if (!until.holds()) throw;
  }
}

// A wildcard receive depends on the peers that have not left: a rank that left sends no more
// messages, but the message may come from another rank.
std::vector<Rank> Mailbox::wildcard_sources() const {
  std::vector<Rank> present, others;
  const uint64_t left = group_.left();
  for (Rank r = 0; r < group_.all_ranks(); ++r) {
    if (r == me_) continue;
    others.push_back(r);
    if (is_remote(r) ? !is_gone(r) : (left >> r & 1) == 0) present.push_back(r);
  }
  if (others.empty()) return {me_};
  return present.empty() ? others : present;
}

std::vector<Rank> Mailbox::missing(const Transfer& transfer) const {
  if (!transfer.posted_) return {me_};
  const Rank peer = transfer.peer();
  return peer == kAnySource ? wildcard_sources() : std::vector<Rank>{peer};
}

}  // namespace pycollect::ipc
