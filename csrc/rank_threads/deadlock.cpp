// The part of RankScheduler that finds ranks that cannot continue: blocked ranks, and deadlocks.
#include <algorithm>
#include <chrono>
#include <set>

#include "../plan/error.h"
#include "scheduler.h"

namespace pycollect::rank_threads {
namespace {

// A rank that is blocked for so long loses its turn if there are objects with waits that the
// scheduler does not know, and if no other thread computes, such as one of torch's parallel loops.
constexpr std::chrono::milliseconds kBlockedShortly{15};
// A rank that is blocked for so long loses its turn in any case.
constexpr std::chrono::seconds kBlocked{3};
// A rank that is blocked for so long is part of a deadlock if all other ranks wait, too.
constexpr std::chrono::milliseconds kStuck{300};

}  // namespace

// One thread polls for all.
void RankScheduler::poll_if_first(Lock& lock, const Member& me) {
  for (const auto& m : ranks_) {
    if (!m->waits() && m->state != MemberState::queued) continue;
    if (m.get() == &me) take_turns_of_blocked(lock);
    return;
  }
  take_turns_of_blocked(lock);
}

void RankScheduler::poll() {
  Lock lock(mutex_);
  if (entered_ < world_) return;
  const auto listeners = listeners_;
  unlocked(lock, [&] {
    for (const auto& listener : listeners)
      if (const auto held = listener.lock()) held->poll();
  });
  take_turns_of_blocked(lock);
  if (aborted_) return;
  const bool any_waits =
      std::any_of(ranks_.begin(), ranks_.end(), [](const auto& m) { return m->waits(); });
  const bool all_ended = std::all_of(ranks_.begin(), ranks_.end(),
                                     [](const auto& m) { return m->state == MemberState::ended; });
  if (!any_waits && !all_ended && !aborted_ && all_stuck()) end_in_deadlock(lock);
}

// A rank that is blocked may wait for another rank. In parallel, it may be part of a deadlock.
void RankScheduler::take_turns_of_blocked(Lock& lock) {
  for (const auto& m : ranks_) {
    if (m->state != MemberState::running || m->at_work) continue;
    const auto blocked = m->activity.blocked_for(true);
    if (blocked < kBlockedShortly) continue;
    if (blocked < kBlocked && (!expects_unknown_waits() || others_run())) continue;
    m->state = MemberState::outside;
    if (!parallel_) unlocked(lock, [&] { hooks_.pause(m->rank); });
    --running_;
    last_ = m->rank;
  }
  dispatch();
}

// Returns the waiting rank whose caller's own limit ends first.
Member* RankScheduler::first_limited() {
  Member* first = nullptr;
  const auto consider = [&](Member& m) {
    if (m.waits() && m.pending.condition->is_limited &&
        (first == nullptr || m.pending.condition->deadline < first->pending.condition->deadline))
      first = &m;
  };
  for (const auto& m : ranks_) consider(*m);
  for (Member* const m : helpers_) consider(*m);
  return first;
}

bool RankScheduler::is_stuck(Member& m) {
  return m.waits() || m.state == MemberState::ended ||
         (m.state == MemberState::outside && m.activity.blocked_for() >= kStuck);
}

// A blocked rank, or one that waits for a key of a store, may wait for a thread that is no rank's.
// It is part of a deadlock only if all of those are blocked, too.
bool RankScheduler::all_stuck() {
  for (const auto& m : ranks_)
    if (!is_stuck(*m)) return false;
  for (Member* const m : entered_helpers_)
    if (!m->waits() && m->activity.blocked_for() < kStuck) return false;
  for (Member* const m : helpers_)  // one that acts for another rank may have been granted
    if (!m->waits()) return false;
  const bool may_wait_for_others = std::any_of(ranks_.begin(), ranks_.end(), [](const auto& m) {
    return m->state == MemberState::outside || (m->waits() && m->pending.condition->is_open);
  });
  return !may_wait_for_others || others_stuck();
}

// Returns the threads of no rank.
std::vector<pid_t> RankScheduler::others() const {
  std::set<pid_t> known{launcher_, ThreadActivity::this_thread()};
  for (const auto& m : ranks_) known.insert(m->activity.thread());
  for (const Member* m : entered_helpers_) known.insert(m->activity.thread());
  std::vector<pid_t> threads = ThreadActivity::all_threads();
  std::erase_if(threads, [&](pid_t thread) { return known.contains(thread); });
  return threads;
}

bool RankScheduler::others_run() const {
  const std::vector<pid_t> threads = others();
  return std::any_of(threads.begin(), threads.end(),
                     [](pid_t thread) { return !ThreadActivity::sleep_of(thread); });
}

// Returns whether all threads of no rank wait for another thread, or sleep as before the launch.
// One that waits for the GIL wakes after 5 ms, so it does not count.
bool RankScheduler::others_stuck() {
  bool all = true;
  for (const pid_t thread : others()) {
    const auto before = usual_sleeps_.find(thread);
    if (before != usual_sleeps_.end() && ThreadActivity::sleep_of(thread) == before->second)
      continue;
    ThreadActivity& other = others_[thread];
    other.attach_to(thread);
    all = other.blocked_for(true) >= kStuck && all;
  }
  return all;
}

void RankScheduler::count_unknown_waits(int more) {
  const bool wakes = unknown_waits_ == 0 && more > 0;
  unknown_waits_ += more;
  if (wakes) wake_pollers();
}

// Ranks that sleep must poll from now on.
void RankScheduler::wake_pollers() {
  for (const auto& m : ranks_) m->granted.notify_one();
}

void RankScheduler::end_in_deadlock(Lock& lock) {
  const std::string ranks = describe_ranks(lock);  // nothing changes: no rank can continue
  abort(AbortKind::deadlock, text("deadlock: no rank can continue", ranks), lock);
}

std::string RankScheduler::describe_ranks() {
  Lock lock(mutex_);
  return describe_ranks(lock);
}

std::string RankScheduler::describe_ranks(Lock& lock) {
  std::vector<std::string> ranks;
  std::string helpers;
  for (const auto& m : ranks_)
    ranks.push_back(m->pending.condition ? text(" waits for ", m->pending.condition->describe())
                    : m->state == MemberState::ended   ? " has ended"
                    : m->state == MemberState::outside ? " is blocked"
                                                       : " runs");
  for (const Member* m : helpers_)
    helpers +=
        text("\n  a thread of rank ", m->rank, " waits for ", m->pending.condition->describe());
  std::string report;
  unlocked(lock, [&] {  // finding a line may take the GIL
    for (Rank r = 0; r < world_; ++r) report += text("\n  rank ", r, ranks[r], hooks_.find_line(r));
  });
  return report + helpers;
}

}  // namespace pycollect::rank_threads
