// See mail_post.h.
#include "mail_post.h"

#include <bit>

#include "../plan/error.h"

namespace pycollect::shm {

// While at least one thread that waits is awake it sees what is done for this rank; the others
// sleep where other processes need not wake them for every message.
class Mailbox::Post::Watch {
 public:
  Watch(Post& post, const Condition& until) : post_(post), until_(until) { ++post_.awake_; }
  ~Watch() { --post_.awake_; }

  // When something has moved, more of it is on its way: that is waited for without offering the
  // core to others, who would keep it for much longer than a piece of a message takes.
  bool is_over() {
    if (until_.holds()) return true;
    if (!advance()) return false;
    const auto step = [this] { return until_.holds() || advance(); };
    for (const auto begin = moved_; !until_.holds() && moved_ - begin < kLooking;)
      if (!post_.group_.spin_for(step)) break;
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
    if (!post_.try_move()) return false;
    moved_ = Clock::now();
    return true;
  }
  void sleep();

  Post& post_;
  const Condition& until_;
  Clock::time_point moved_ = Clock::now();  // when something was last
  std::chrono::milliseconds next_{1};
};

// Before it sleeps it waits for the lock and moves things itself, so that no thread can have looked
// too early and left. One that sleeps beside another looks after a millisecond whether it is
// needed.
void Mailbox::Post::Watch::sleep() {
  constexpr std::chrono::milliseconds kBeside{1}, kLongest{10};
  const auto busy = [&] {
    const bool moved = post_.move(post_.lock());
    if (moved) moved_ = Clock::now();
    return moved || until_.holds();
  };
  if (until_.mail != nullptr) until_.mail->count_sleeper(1);
  if (--post_.awake_ == 0) {
    post_.area_.bell(post_.me_).sleep(next_, busy);
    next_ = std::min(2 * next_, kLongest);
  } else {
    post_.beside_.sleep(kBeside, busy);
  }
  ++post_.awake_;
  if (until_.mail != nullptr) until_.mail->count_sleeper(-1);
}

Mailbox::Post::Post(Group& group)
    : group_(group),
      area_(group.mailboxes(), group.world()),
      me_(group.rank()),
      outgoing_(area_, me_, effects_),
      incoming_(area_, me_, effects_) {}

// Rings outside the lock: the kernel takes its time to wake somebody, who then wants the lock.
bool Mailbox::Post::unlock(Locked locked) {
  const Effects effects = std::exchange(effects_, {});
  open_.fetch_sub(effects.finished, std::memory_order_acq_rel);
  locked.unlock();
  for (uint64_t left = effects.touched; left != 0; left &= left - 1)
    area_.bell(std::countr_zero(left)).ring();
  if (effects.awaited) ring_own();
  return effects.touched != 0 || effects.finished != 0;
}

// Under the lock. What a peer has written that makes no sense ends the group.
template <class Act>
void Mailbox::Post::guard(const Act& act) {
  try {
    act();
  } catch (const CollectiveError& error) {
    group_.abort(error.what());
    outgoing_.fail(std::current_exception());
    incoming_.fail(std::current_exception());
  }
}

bool Mailbox::Post::move(Locked locked) {
  guard([this] {
    outgoing_.move();
    incoming_.move();
  });
  return unlock(std::move(locked));
}

// What has come, however much; but not for ever, because ranks that are there may go on sending.
void Mailbox::Post::move_all(const Condition& until) {
  for (int n = MailArea::most_unread(group_.world()) / Incoming::kMostTaken + 1; n >= 0; --n)
    if (until.holds() || !move(lock())) return;
}

bool Mailbox::Post::try_move() {
  if (!origin_.is_here()) return false;
  Locked locked(mutex_, std::try_to_lock);
  return locked && move(std::move(locked));
}

void Mailbox::Post::request(const char* operation, const std::function<void()>& ask) {
  group_.require_whole({operation, ++requests_, Deadline::max()});
  Locked locked = lock();
  ++open_;
  guard(ask);
  unlock(std::move(locked));
}

void Mailbox::Post::send(const MailPtr& mail) {
  request("send", [&] { outgoing_.send(mail); });
}

void Mailbox::Post::receive(const MailPtr& mail) {
  request("recv", [&] { incoming_.receive(mail); });
}

void Mailbox::Post::supply(Mail& mail, uint64_t there) {
  if (!origin_.is_here()) return;
  const Locked locked = lock();
  mail.there = there;
}

void Mailbox::Post::fail(const std::exception_ptr& error) {
  if (!origin_.is_here()) return;
  Locked locked = lock();
  outgoing_.fail(error);
  incoming_.fail(error);
  unlock(std::move(locked));
}

void Mailbox::Post::ring_own() {
  area_.bell(me_).ring();
  beside_.ring();
}

std::vector<Rank> Mailbox::Post::missing() {
  const std::lock_guard locked(mutex_);
  const uint64_t ranks = outgoing_.missing() | incoming_.missing();
  if (ranks == ~uint64_t{0}) return anybody();
  std::vector<Rank> named;
  for (Rank r = 0; r < group_.world(); ++r)
    if (ranks >> r & 1) named.push_back(r);
  return named;
}

// Who has left in good order sends nothing any more, but the message may come from another.
std::vector<Rank> Mailbox::Post::anybody() const {
  std::vector<Rank> there, others;
  for (Rank r = 0; r < group_.world(); ++r) {
    if (r == me_) continue;
    others.push_back(r);
    if (group_.line(r).left.load(std::memory_order_acquire) == 0) there.push_back(r);
  }
  if (others.empty()) return {me_};
  return there.empty() ? others : there;
}

void Mailbox::Post::wait(const Condition& until, const Occasion& occasion) {
  if (until.holds()) return;
  Watch watch(*this, until);
  // Who is gone may have done its part before. All of that is in the memory, and is moved by this,
  // while `is_over` leaves it to the thread that holds the lock.
  const auto missing = [&] {
    move_all(until);
    return until.missing();
  };
  try {
    group_.require_whole(occasion);
    group_.await([&] { return watch.is_over(); }, missing, occasion, [&] { watch.rest(); });
  } catch (const CollectiveError&) {
    fail(std::current_exception());
    if (!until.holds()) throw;
  }
}

}  // namespace pycollect::shm
