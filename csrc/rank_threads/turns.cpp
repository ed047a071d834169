// The part of RankScheduler that gives ranks their turns, and in which they sleep.
#include <sched.h>

#include <algorithm>
#include <chrono>

#include "member.h"

namespace pycollect::rank_threads {
namespace {

// How often a waiting thread looks whether a running rank is blocked, if there are objects with
// waits that the scheduler does not know.
constexpr std::chrono::milliseconds kPollInterval{5};
// How long to yield before sleeping.
constexpr std::chrono::microseconds kYieldTime{200};

// Offers the core to other threads, for a short time, while the state is this one. A thread that
// sleeps takes 35 us to wake on another core, and one that yields takes its turn at once.
void yield_while(const std::atomic<MemberState>& state, MemberState unchanged, WorkShare& share) {
  const Deadline until = Clock::now() + kYieldTime;
  share.count_awake(1);
  while (state.load(std::memory_order_acquire) == unchanged && Clock::now() < until) {
    share.help();
    sched_yield();
  }
  share.count_awake(-1);
}

}  // namespace

// The next turn is of the first rank after `last` that can continue.
void RankScheduler::end_turn(Lock& lock, Member& me, Rank last) {
  if (me.is_main && !parallel_) unlocked(lock, [&] { hooks_.pause(me.rank); });
  me.state = MemberState::waiting;
  if (me.is_main) {
    --running_;
    last_ = last;
  } else {
    helpers_.push_back(&me);
    wake_pollers();
  }
  dispatch();
}

void RankScheduler::begin_turn(Lock& lock, Member& me) {
  if (!me.is_main) std::erase(helpers_, &me);
  if (me.is_main && !parallel_) unlocked(lock, [&] { hooks_.resume(me.rank); });
  const auto tasks = std::exchange(me.tasks, {});
  if (!tasks.empty())
    unlocked(lock, [&] {
      for (const auto& task : tasks) run_task(task);
    });
}

// Waits for a turn, and for nothing else.
void RankScheduler::take_turn(Lock& lock, Member& me) {
  me.state = MemberState::queued;
  dispatch();
  while (me.state == MemberState::queued) sleep(lock, me);
  begin_turn(lock, me);
}

void RankScheduler::regain_turn(Lock& lock, Member& me) {
  if (me.state == MemberState::outside) take_turn(lock, me);
}

void RankScheduler::sleep(Lock& lock, Member& me) {
  const MemberState before = me.state;
  unlocked(lock, [&] { yield_while(me.state, before, share_); });
  if (me.state != before) return;
  const bool polls = expects_unknown_waits();
  Deadline until = me.condition && !me.expired ? me.condition->deadline : Deadline::max();
  if (polls) until = std::min(until, Clock::now() + kPollInterval);
  me.sleeps = true;
  if (until == Deadline::max())
    me.granted.wait(lock);
  else
    me.granted.wait_until(lock, until);
  me.sleeps = false;
  if (me.state != before) return;
  if (me.condition && !me.expired && me.condition->deadline <= Clock::now()) {
    me.expired = true;
    dispatch();
  }
  if (polls && me.state == before) poll_if_first(lock, me);
}

bool RankScheduler::can_continue(const Member& m) const {
  if (m.state == MemberState::queued) return true;
  return m.waits() &&
         (aborted_ || m.expired || !m.tasks.empty() || m.condition->ready() ||
          (m.condition->deadline != Deadline::max() && m.condition->deadline <= Clock::now()));
}

void RankScheduler::grant(Member& m) {
  m.state = MemberState::running;
  if (m.is_main) ++running_;
  if (m.sleeps) m.granted.notify_one();
}

void RankScheduler::dispatch() {
  if (entered_ < world_ && !aborted_) return;
  for (Member* m : helpers_)
    if (m->waits() && can_continue(*m)) grant(*m);
  while (running_ < turns_)
    if (Member* const m = next())
      grant(*m);
    else
      return;
}

// Returns the rank that has the next turn: in the order of ranks, after the last one.
Member* RankScheduler::next() {
  const auto find = [&](auto&& accepts) -> Member* {
    for (int i = 1; i <= world_; ++i)
      if (Member* const m = ranks_[(last_ + i) % world_].get(); accepts(*m)) return m;
    return nullptr;
  };
  if (Member* const m = find([&](const Member& m) { return can_continue(m); })) return m;
  if (running_ > 0) return nullptr;
  if (Member* const m = find([](const Member& m) { return m.waits() && m.gives_way; })) {
    m->released = true;
    return m;
  }
  if (!all_stuck()) return nullptr;
  if (Member* const m = first_limited()) {
    m->expired = true;
    return m;
  }
  deadlocked_ = true;
  return find([](const Member& m) { return m.waits(); });
}

}  // namespace pycollect::rank_threads
