// See scheduler.h. What finds ranks that cannot continue is in deadlock.cpp.
#include "scheduler.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "../plan/error.h"

namespace pycollect::rank_threads {
namespace {

struct OwnMember {  // the calling thread's place in a launch
  RankScheduler* scheduler = nullptr;
  Member* member = nullptr;
};
thread_local OwnMember own;

// Makes a thread of a launch act as a helper of another rank.
class HelperScope {
 public:
  HelperScope(RankScheduler* scheduler, Rank rank)
      : member_{.rank = rank, .is_main = false}, before_(own) {
    member_.state = MemberState::running;
    own = {scheduler, &member_};
  }
  ~HelperScope() { own = before_; }
  HelperScope(const HelperScope&) = delete;
  HelperScope& operator=(const HelperScope&) = delete;

 private:
  Member member_;
  const OwnMember before_;
};

// A thread that no rank has started, but that waits on behalf of ranks, such as one of a thread
// pool. The launch counts it as a helper until it ends: it may do what the ranks wait for.
class ForeignThread {
 public:
  ~ForeignThread() { leave(); }

  // Makes the calling thread a helper of the rank, until it is reset.
  void act_as(const std::shared_ptr<RankScheduler>& scheduler, Rank rank) {
    if (scheduler_.lock() != scheduler) {
      leave();
      scheduler->enter_helper(rank);
      scheduler_ = scheduler;
      helper_ = own;
    }
    own = helper_;
    own.member->rank = rank;
  }

 private:
  void leave() {
    if (const auto scheduler = scheduler_.lock()) {
      own = helper_;
      scheduler->leave_helper();
    } else {
      delete helper_.member;
    }
    helper_ = {};
  }

  std::weak_ptr<RankScheduler> scheduler_;
  OwnMember helper_;
};
thread_local ForeignThread foreign_thread;

class ForeignWait {
 public:
  ForeignWait(const std::shared_ptr<RankScheduler>& scheduler, Rank rank) : before_(own) {
    foreign_thread.act_as(scheduler, rank);
  }
  ~ForeignWait() { own = before_; }
  ForeignWait(const ForeignWait&) = delete;
  ForeignWait& operator=(const ForeignWait&) = delete;

 private:
  const OwnMember before_;
};

// A callback that runs at the beginning of a turn may wait, too: keeps the wait that it interrupts.
struct OuterWait {
  Member& member;
  const PendingWait before;
  ~OuterWait() { member.pending = before; }
};

// Returns the calls, but for those of locks, in which threads of the process sleep now, or slept
// when an earlier launch began: one may be awake for a moment.
std::map<pid_t, ThreadActivity::Sleep> usual_sleeps() {
  static std::mutex mutex;
  static std::map<pid_t, ThreadActivity::Sleep> usual;
  const std::lock_guard lock(mutex);
  for (const pid_t thread : ThreadActivity::all_threads())
    if (auto sleep = ThreadActivity::sleep_of(thread); sleep && !ThreadActivity::is_lock(*sleep))
      usual[thread] = std::move(*sleep);
  return usual;
}

}  // namespace

void run_callback(const std::function<void()>& callback) {
  try {
    callback();
  } catch (const std::exception&) {
  }
}

RankScheduler::RankScheduler(int world, bool parallel, RankHooks hooks)
    : world_(world),
      parallel_(parallel),
      turns_(parallel ? world : 1),
      hooks_(std::move(hooks)),
      launcher_(ThreadActivity::this_thread()),
      usual_sleeps_(usual_sleeps()),
      last_(world - 1) {
  for (Rank r = 0; r < world; ++r)
    ranks_.push_back(std::unique_ptr<Member>(new Member{.rank = r, .is_main = true}));
}

RankScheduler::~RankScheduler() = default;

std::shared_ptr<RankScheduler> RankScheduler::of_thread() {
  return own.scheduler == nullptr ? nullptr : own.scheduler->shared_from_this();
}

Rank RankScheduler::rank_of_thread() const { return own.scheduler == this ? own.member->rank : -1; }

void RankScheduler::enter(Rank rank) {
  Member& me = *ranks_[rank];
  me.activity.attach_to(ThreadActivity::this_thread());
  own = {this, &me};
  Lock lock(mutex_);
  ++entered_;
  take_turn(lock, me);
  if (aborted_) throw_cause("the start of the rank");
}

void RankScheduler::leave() {
  const Lock lock(mutex_);
  Member& me = *own.member;
  own = {};
  if (me.state == MemberState::running) --running_;
  me.state = MemberState::ended;
  last_ = me.rank;
  dispatch();
}

Member* RankScheduler::add_helper(Rank rank) {
  std::unique_ptr<Member> helper(new Member{.rank = rank, .is_main = false});
  helper->state = MemberState::running;
  const Lock lock(mutex_);
  entered_helpers_.push_back(helper.get());
  return helper.release();
}

void RankScheduler::remove_helper(Member* helper) {
  const std::unique_ptr<Member> held(helper);
  const Lock lock(mutex_);
  std::erase(entered_helpers_, helper);
  dispatch();
}

void RankScheduler::become(Member* helper) {
  own = {this, helper};
  const Lock lock(mutex_);
  helper->activity.attach_to(ThreadActivity::this_thread());
}

void RankScheduler::leave_helper() { remove_helper(std::exchange(own, {}).member); }

bool RankScheduler::wait(Rank rank, const ReadyCondition& condition) {
  return wait(rank, condition, WaitMode::until_ready);
}

bool RankScheduler::yield_until(Rank rank, const ReadyCondition& condition) {
  return wait(rank, condition, WaitMode::yield);
}

bool RankScheduler::wait(Rank rank, const ReadyCondition& condition, WaitMode mode) {
  if (own.scheduler != this) {
    const ForeignWait helper(shared_from_this(), rank);
    return wait(rank, condition, mode);
  }
  if (own.member->rank != rank) {
    const HelperScope helper(this, rank);
    return wait(rank, condition, mode);
  }
  Member& me = *own.member;
  Lock lock(mutex_);
  regain_turn(lock, me);
  if ((mode != WaitMode::in_order || aborted_) && condition.ready()) return true;
  if (aborted_) throw_cause(condition.describe());
  // Without a turn, a thread need not end it for others.
  if (mode == WaitMode::yield && (!me.is_main || parallel_)) return false;
  const OuterWait outer{me, me.pending};
  me.pending = {&condition, mode == WaitMode::yield};
  const bool holds = park(lock, me, mode);
  if (!holds && aborted_) throw_cause(condition.describe());
  return holds;
}

void RankScheduler::let_others_run(Rank rank) {
  yield_until(rank, {[] { return false; }, [] { return "other ranks"; }});
}

void RankScheduler::align(Rank rank) {
  {
    const Lock lock(mutex_);
    ++aligned_;
  }
  wait(rank, {[this] { return aligned_ == world_; }, [] { return "the start of the other ranks"; }},
       WaitMode::in_order);
}

void RankScheduler::yield_in_order(Rank rank) {
  if (parallel_ || rank_of_thread() != rank || !own.member->is_main) return;
  wait(rank, {[] { return true; }, [] { return "a turn"; }}, WaitMode::in_order);
}

void RankScheduler::require_turn(Rank rank, const std::string& operation) {
  Lock lock(mutex_);
  if (rank_of_thread() == rank) regain_turn(lock, *own.member);
  if (aborted_) throw_cause(operation);
}

void RankScheduler::regain_turn() {
  if (own.scheduler != this) return;
  Lock lock(mutex_);
  regain_turn(lock, *own.member);
}

// Returns whether the member's condition holds. It does not after a deadline, an abort, or if the
// member yields and no other can continue.
bool RankScheduler::park(Lock& lock, Member& me, WaitMode mode) {
  for (;;) {
    end_turn(lock, me, mode == WaitMode::in_order ? world_ - 1 : me.rank);
    while (me.waits()) sleep(lock, me);
    begin_turn(lock, me);
    if (me.pending.condition->ready()) return true;
    if (deadlocked_ && !aborted_) end_in_deadlock(lock);
    if (aborted_ || me.pending.expired || me.pending.released) return false;
    if (me.pending.condition->deadline <= Clock::now()) return false;
  }
}

void RankScheduler::run_as(Rank rank, const std::function<void()>& callback) {
  Member& m = *ranks_[rank];
  {
    const Lock lock(mutex_);
    if (m.waits() || m.state == MemberState::queued) {
      m.callbacks.push_back(callback);
      dispatch();
      return;
    }
  }
  if (rank_of_thread() == rank) return run_callback(callback);
  // The rank runs, or is blocked in a wait that the scheduler does not know, perhaps for this
  // callback.
  try {
    run_on_thread(rank, callback);
  } catch (const std::system_error&) {  // there can be no more threads
    const HelperScope helper(this, rank);
    run_callback(callback);
  }
}

void RankScheduler::run_on_thread(Rank rank, std::function<void()> callback) {
  Member* const helper = add_helper(rank);  // it counts before its thread runs
  try {
    std::thread([callback = std::move(callback), self = shared_from_this(), helper] {
      self->become(helper);
      run_callback(callback);
      self->leave_helper();
    }).detach();
  } catch (const std::system_error&) {
    remove_helper(helper);
    throw;
  }
}

RankScheduler::AtWork::AtWork(const RankScheduler& scheduler)
    : member_(own.scheduler == &scheduler ? own.member : nullptr) {
  if (member_ != nullptr) member_->at_work = true;
}
RankScheduler::AtWork::~AtWork() {
  if (member_ != nullptr) member_->at_work = false;
}

// --- turns, and the sleep until one

namespace {

// How often a waiting thread looks whether a running rank is blocked, if there are objects with
// waits that the scheduler does not know.
constexpr std::chrono::milliseconds kPollInterval{5};
// How long to yield before sleeping.
constexpr std::chrono::microseconds kYieldTime{200};

// Offers the core to other threads, for a short time, while the state is unchanged. A thread that
// sleeps takes 35 us to wake on another core, and one that yields takes its turn at once.
void yield_while(const std::atomic<MemberState>& state, MemberState unchanged, LoopShare& share) {
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
  const auto callbacks = std::exchange(me.callbacks, {});
  if (!callbacks.empty())
    unlocked(lock, [&] {
      for (const auto& callback : callbacks) run_callback(callback);
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
  Deadline until = me.pending.condition && !me.pending.expired ? me.pending.condition->deadline
                                                               : Deadline::max();
  if (polls) until = std::min(until, Clock::now() + kPollInterval);
  me.sleeps = true;
  if (until == Deadline::max())
    me.granted.wait(lock);
  else
    me.granted.wait_until(lock, until);
  me.sleeps = false;
  if (me.state != before) return;
  if (me.pending.condition && !me.pending.expired &&
      me.pending.condition->deadline <= Clock::now()) {
    me.pending.expired = true;
    dispatch();
  }
  if (polls && me.state == before) poll_if_first(lock, me);
}

bool RankScheduler::can_continue(const Member& m) const {
  if (m.state == MemberState::queued) return true;
  return m.waits() &&
         (aborted_ || m.pending.expired || !m.callbacks.empty() || m.pending.condition->ready() ||
          (m.pending.condition->deadline != Deadline::max() &&
           m.pending.condition->deadline <= Clock::now()));
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
  if (Member* const m = find([](const Member& m) { return m.waits() && m.pending.yields; })) {
    m->pending.released = true;
    return m;
  }
  if (!all_stuck()) return nullptr;
  if (Member* const m = first_limited()) {
    m->pending.expired = true;
    return m;
  }
  deadlocked_ = true;
  return find([](const Member& m) { return m.waits(); });
}

// --- the end of a launch before its ranks have ended

std::exception_ptr make_abort_error(AbortKind kind, const std::string& why) {
  switch (kind) {
    case AbortKind::deadlock:
      return std::make_exception_ptr(Deadlock(why));
    case AbortKind::timed_out:
      return std::make_exception_ptr(Timeout(why));
    case AbortKind::peer_lost:
      break;
  }
  return std::make_exception_ptr(PeerLost(why));
}

void RankScheduler::abort(AbortKind kind, const std::string& cause) {
  Lock lock(mutex_);
  abort(kind, cause, lock);
}

void RankScheduler::abort(AbortKind kind, const std::string& cause, Lock& lock) {
  if (aborted_) return;
  aborted_ = true;
  abort_ = {kind, cause};
  dispatch();
  const auto listeners = std::exchange(listeners_, {});
  unlocked(lock, [&] {
    for (const auto& listener : listeners)
      if (const auto held = listener.lock()) held->abort(kind, cause);
  });
}

void RankScheduler::add_listener(const std::shared_ptr<LaunchListener>& listener) {
  {
    const Lock lock(mutex_);
    std::erase_if(listeners_, [](const auto& l) { return l.expired(); });
    if (!aborted_) return listeners_.push_back(listener);
  }
  listener->abort(abort_.kind, abort_.cause);
}

bool RankScheduler::is_aborted() {
  const Lock lock(mutex_);
  return aborted_;
}

void RankScheduler::throw_cause(const std::string& operation) const {
  const std::string why = text(operation, ": ", abort_.cause);
  std::rethrow_exception(make_abort_error(abort_.kind, why));
}

}  // namespace pycollect::rank_threads
