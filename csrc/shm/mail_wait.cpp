// See mailbox.h: what a thread of this rank does and sleeps on while it waits.
#include <algorithm>

#include "../plan/error.h"
#include "mailbox.h"

namespace pycollect::shm {

// While at least one thread that waits is awake it sees what is done for this rank; the others
// sleep where other processes need not wake them for every message, and are woken for what they
// wait for only: else messages of 64 KiB take 1.4 times as long while another thread sleeps, and of
// 64 bytes twice.
class Mailbox::Watch {
 public:
  Watch(Mailbox& box, const Until& until) : box_(box), until_(until) { ++box_.awake_; }
  ~Watch() { --box_.awake_; }

  // When something has moved, more of it is on its way: that is waited for without offering the
  // core to others, who would keep it for much longer than a piece of a message takes.
  bool is_over() {
    if (until_.holds()) return true;
    if (!advance()) return false;
    const auto step = [this] { return until_.holds() || advance(); };
    for (const auto begin = moved_; !until_.holds() && moved_ - begin < kLooking;)
      if (!box_.group_.spin_for(step)) break;
    return until_.holds();
  }
  // Comes after spinning and yielding, again and again.
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
  const Until& until_;
  Clock::time_point moved_ = Clock::now();  // when something was last
  std::chrono::microseconds next_{1'000};
};

// Before it sleeps it waits for the lock and moves things itself, so that no thread can have looked
// too early and left. One that sleeps beside another looks after a millisecond whether it is
// needed.
void Mailbox::Watch::sleep() {
  // A glance costs a tenth of what the exchange of a small message through the host does.
  constexpr std::chrono::microseconds kGlance{50}, kBeside{1'000}, kLongest{10'000};
  const auto busy = [&] {
    const bool moved = box_.move(Locked(box_.mutex_));
    if (moved) moved_ = Clock::now();
    return moved || until_.holds();
  };
  const auto at_most = [&](auto nap) {
    return [&, nap] { return until_.glances && until_.glances() ? kGlance : nap; };
  };
  if (until_.transfer != nullptr) until_.transfer->count_sleeper(1);
  if (--box_.awake_ == 0) {
    box_.area_.bell(box_.me_).sleep(at_most(next_), busy);
    next_ = std::min(2 * next_, kLongest);
  } else {
    box_.beside_.sleep(at_most(kBeside), busy);
  }
  ++box_.awake_;
  if (until_.transfer != nullptr) until_.transfer->count_sleeper(-1);
}

// What has come, however much; but not for ever, because ranks that are there may go on sending.
// Returns whether the end of the wait was met on the way.
bool Mailbox::move_all(const Until& until) {
  for (int n = MailArea::most_unread(group_.world()) / Incoming::kMostTaken + 1; n >= 0; --n) {
    if (until.holds()) return true;
    if (!move(Locked(mutex_))) break;
  }
  return false;
}

void Mailbox::wait(const Until& until, const Occasion& occasion) {
  if (until.holds()) return;
  Watch watch(*this, until);
  // Who is gone may have done its part before. All of that is in the memory, and is moved by this,
  // while `is_over` leaves it to the thread that holds the lock. Meanwhile others may go, who have
  // done theirs: so it names whom this has depended on all the while.
  const auto needed = [&] {
    const std::vector<Rank> before = until.missing();
    if (move_all(until)) return std::vector<Rank>();
    std::vector<Rank> missing = until.missing();
    std::erase_if(missing, [&](Rank r) { return !std::ranges::count(before, r); });
    return missing;
  };
  try {
    group_.require_whole(occasion);
    group_.await([&] { return watch.is_over(); }, needed, occasion, [&] { watch.rest(); });
  } catch (const CollectiveError&) {
    fail(std::current_exception());
    if (!until.holds()) throw;
  }
}

void Mailbox::wait(Transfer& transfer, const Occasion& occasion) {
  const auto missing = [&] { return this->missing(transfer); };
  wait({[&] { return transfer.done(); }, missing, &transfer}, occasion);
  transfer.rethrow();
}

// Who has left in good order sends nothing any more, but the message may come from another.
std::vector<Rank> Mailbox::anybody() const {
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
  return peer == kAnybody ? anybody() : std::vector<Rank>{peer};
}

}  // namespace pycollect::shm
