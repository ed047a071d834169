// See mailbox.h: requests, and the lock under which transfers make progress.
#include "mailbox.h"

#include <algorithm>
#include <bit>

#include "../plan/dtype.h"
#include "../plan/error.h"

namespace pycollect::shm {
namespace {

std::string name(const Envelope& envelope) {
  const bool known = envelope.dtype < DTypes::size;
  const std::string dtype =
      known ? pycollect::name(DType{envelope.dtype}) : text("dtype ", int{envelope.dtype});
  return text(envelope.bytes, " bytes of ", dtype);
}

void check_there(uint64_t there, uint64_t bytes) {
  require(there <= bytes, "a message of ", bytes, " bytes cannot have ", there, " available");
}

}  // namespace

std::exception_ptr mismatch(Rank from, const Envelope& sent, Rank to, const Envelope& wanted) {
  return std::make_exception_ptr(std::invalid_argument(
      text("rank ", from, " sent ", name(sent), " with tag ", sent.tag, " to rank ", to,
           ", which received ", name(wanted), " there: both must be the same")));
}

Mailbox::Mailbox(Group& group)
    : group_(group),
      area_(group.mailboxes(), group.world()),
      me_(group.rank()),
      outgoing_(area_, me_, effects_),
      incoming_(area_, me_, effects_) {}

Rank Mailbox::check_to(Rank to) const {
  const int world = group_.world();
  require(to >= 0 && to < world, "cannot send to rank ", to, ": the ranks of the group are 0 to ",
          world - 1);
  return to;
}

Rank Mailbox::check_from(std::optional<Rank> from) const {
  const int world = group_.world();
  const Rank peer = from.value_or(kAnySource);
  require(!from || (peer >= 0 && peer < world), "cannot receive from rank ", peer,
          ": the ranks of the group are 0 to ", world - 1);
  return peer;
}

TransferPtr Mailbox::send(Rank to, const Envelope& envelope, const std::byte* data) {
  const auto made = std::make_shared<Transfer>(check_to(to), envelope, data, envelope.bytes);
  return ask("send", made, [&] { outgoing_.send(made); });
}

TransferPtr Mailbox::send_partly(Rank to, const Envelope& envelope, const std::byte* data,
                                 uint64_t there) {
  const std::size_t max_eager_bytes = MailArea::max_eager_bytes(group_.world());
  require(envelope.bytes > max_eager_bytes, "a message of ", envelope.bytes,
          " bytes cannot be sent partly: up to ", max_eager_bytes, " are copied at once");
  check_there(there, envelope.bytes);
  const auto made = std::make_shared<Transfer>(check_to(to), envelope, data, there);
  return ask("send", made, [&] { outgoing_.send(made); });
}

void Mailbox::supply(Transfer& send, uint64_t there) {
  check_there(there, send.envelope.bytes);
  if (!origin_.is_here()) return;
  const Locked locked(mutex_);
  send.there_ = there;
}

TransferPtr Mailbox::receive(std::optional<Rank> from, const Envelope& envelope, std::byte* into) {
  const auto made = std::make_shared<Transfer>(check_from(from), envelope, into);
  return ask("recv", made, [&] { incoming_.receive(made); });
}

TransferPtr Mailbox::ask(const char* operation, TransferPtr transfer,
                         const std::function<void()>& act) {
  group_.require_healthy({operation, ++requests_, Deadline::max()});
  Locked locked(mutex_);
  ++open_;
  guard(act);
  unlock(std::move(locked));
  return transfer;
}

// Rings doorbells after unlocking: a wake-up takes time, and the woken thread needs the lock.
bool Mailbox::unlock(Locked locked) {
  const Wakeups effects = std::exchange(effects_, {});
  open_.fetch_sub(effects.finished, std::memory_order_acq_rel);
  locked.unlock();
  for (uint64_t left = effects.touched; left != 0; left &= left - 1)
    area_.doorbell(std::countr_zero(left)).ring();
  if (effects.awaited) wake();
  return effects.touched != 0 || effects.finished != 0;
}

// Runs `act` under the lock. An invalid record of a peer or an allocation failure aborts the group
// and fails all transfers, so none stays queued whose caller got an error.
template <class Act>
void Mailbox::guard(const Act& act) {
  try {
    act();
  } catch (const std::exception& error) {
    group_.abort(error.what());
    outgoing_.fail(std::current_exception());
    incoming_.fail(std::current_exception());
  }
}

bool Mailbox::move(Locked locked) {
  guard([this] {
    outgoing_.move();
    incoming_.move();
  });
  return unlock(std::move(locked));
}

bool Mailbox::progress() {
  if (!origin_.is_here()) return false;
  Locked locked(mutex_, std::try_to_lock);
  return locked && move(std::move(locked));
}

void Mailbox::fail(const std::exception_ptr& error) {
  if (!origin_.is_here()) return;
  Locked locked(mutex_);
  outgoing_.fail(error);
  incoming_.fail(error);
  unlock(std::move(locked));
}

void Mailbox::wake() {
  area_.doorbell(me_).ring();
  beside_.ring();
}

// See mailbox.h: how a thread of this rank waits, and which doorbell it sleeps on.
// A wait of one thread. While at least one waiting thread is awake, it makes progress for the rank.
// The other threads sleep on a doorbell that no peer rings, and wake only for their own transfer.
// Otherwise, while a second thread sleeps, messages of 64 KiB take 1.4 times as long, and messages
// of 64 bytes twice as long.
class Mailbox::Waiter {
 public:
  Waiter(Mailbox& box, const WaitCondition& until) : box_(box), until_(until) { ++box_.awake_; }
  ~Waiter() { --box_.awake_; }

  // When something has moved, more follows soon. That is waited for without yielding the core,
  // because another thread would keep it for much longer than a fragment takes.
  bool is_over() {
    if (until_.holds()) return true;
    if (!advance()) return false;
    const auto step = [this] { return until_.holds() || advance(); };
    for (const auto begin = moved_; !until_.holds() && moved_ - begin < kLooking;)
      if (!box_.group_.spin_for(step)) break;
    return until_.holds();
  }
  // The last stage of a wait, called repeatedly after spinning and yielding.
  void rest() {
    const auto begin = Clock::now();
    for (auto now = begin; now - moved_ < kYielding; now = Clock::now()) {
      if (is_over() || now - begin > kLooking) return;
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
  Clock::time_point moved_ = Clock::now();  // when something last moved
  std::chrono::microseconds next_{1'000};
};

// Before a thread sleeps it takes the lock and makes progress itself, so it misses nothing that
// another thread checked for too early. A thread that sleeps while another is awake wakes after a
// millisecond to check whether it is needed.
void Mailbox::Waiter::sleep() {
  // A poll every kPollInterval costs a tenth of the exchange of a small message through the host.
  constexpr std::chrono::microseconds kPollInterval{50}, kBeside{1'000}, kLongest{10'000};
  const auto busy = [&] {
    const bool moved = box_.move(Locked(box_.mutex_));
    if (moved) moved_ = Clock::now();
    return moved || until_.holds();
  };
  const auto at_most = [&](auto interval) {
    return [&, interval] { return until_.polls && until_.polls() ? kPollInterval : interval; };
  };
  if (until_.transfer != nullptr) until_.transfer->count_sleeper(1);
  if (--box_.awake_ == 0) {
    box_.area_.doorbell(box_.me_).sleep(at_most(next_), busy);
    next_ = std::min(2 * next_, kLongest);
  } else {
    box_.beside_.sleep(at_most(kBeside), busy);
  }
  ++box_.awake_;
  if (until_.transfer != nullptr) until_.transfer->count_sleeper(-1);
}

// Moves everything that has arrived, with a bound, because live ranks may go on sending. Returns
// true if `until` held meanwhile.
bool Mailbox::move_all(const WaitCondition& until) {
  for (int n = MailArea::most_unread(group_.world()) / Incoming::kMostTaken + 1; n >= 0; --n) {
    if (until.holds()) return true;
    if (!move(Locked(mutex_))) break;
  }
  return false;
}

void Mailbox::wait(const WaitCondition& until, const OpContext& context) {
  if (until.holds()) return;
  Waiter watch(*this, until);
  // A rank that is gone may have done its part before. That part is in the shared memory, and
  // move_all takes it, while `is_over` leaves it to the thread that holds the lock. Ranks that have
  // done their part may leave meanwhile, so only those count that were missing before and after.
  const auto needed = [&] {
    const std::vector<Rank> before = until.missing();
    if (move_all(until)) return std::vector<Rank>();
    std::vector<Rank> missing = until.missing();
    std::erase_if(missing, [&](Rank r) { return !std::ranges::count(before, r); });
    return missing;
  };
  try {
    group_.require_healthy(context);
    group_.await([&] { return watch.is_over(); }, needed, context, [&] { watch.rest(); });
  } catch (const CollectiveError&) {
    fail(std::current_exception());
    if (!until.holds()) throw;
  }
}

void Mailbox::wait(Transfer& transfer, const OpContext& context) {
  const auto missing = [&] { return this->missing(transfer); };
  wait({[&] { return transfer.done(); }, missing, &transfer}, context);
  transfer.rethrow();
}

// A wildcard receive depends on the peers that have not left: a rank that left in good order sends
// nothing more, but the message may come from another rank.
std::vector<Rank> Mailbox::wildcard_sources() const {
  std::vector<Rank> there, others;
  const uint64_t left = group_.left();
  for (Rank r = 0; r < group_.world(); ++r) {
    if (r == me_) continue;
    others.push_back(r);
    if ((left >> r & 1) == 0) there.push_back(r);
  }
  if (others.empty()) return {me_};
  return there.empty() ? others : there;
}

std::vector<Rank> Mailbox::missing(const Transfer& transfer) const {
  const Rank peer = transfer.peer();
  return peer == kAnySource ? wildcard_sources() : std::vector<Rank>{peer};
}

}  // namespace pycollect::shm
