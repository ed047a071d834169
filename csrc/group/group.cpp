#include "group.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <thread>

#include "../plan/error.h"
#include "placement.h"
#include "rendezvous.h"

namespace pycollect::ipc {
namespace {

// The least that a region of a staging buffer grows to: small calls of many regions touch a page of
// each. Growing further takes 20 us each time.
constexpr std::size_t kLeastReserved = 256;

std::vector<Rank> ranks_of(uint64_t mask) {
  std::vector<Rank> ranks;
  for (; mask != 0; mask &= mask - 1) ranks.push_back(std::countr_zero(mask));
  return ranks;
}

}  // namespace

Group::Group(Store& store, Rank rank, int world, GroupSettings settings)
    : rank_(rank),
      world_(world),
      settings_(std::move(settings)),
      layout_({world, settings_.buffer_bytes, settings_.mailbox_bytes,
               settings_.symmetric_heap_bytes, settings_.exposed_bytes}) {
  require(world >= 1 && (world <= kMaxRanks || !settings_.one_host), "a pycollect group has 1 to ",
          kMaxRanks, " ranks on one host, not ", world);
  require(rank >= 0 && rank < world, "rank ", rank, " is not in a group of ", world,
          " ranks: the rank must be 0 to ", world - 1);
  for (const auto& [what, bytes] : {std::pair{"buffer_bytes", settings_.buffer_bytes},
                                    {"mailbox_bytes", settings_.mailbox_bytes},
                                    {"symmetric_heap_bytes", settings_.symmetric_heap_bytes}})
    require(bytes <= kMostBytes, what, " is ", bytes, "; it must be at most ", kMostBytes);
  seen_ = std::make_unique<std::atomic<uint64_t>[]>(world);
  Membership joined = rendezvous(store, rank_, layout_, settings_);
  segment_ = std::move(joined.segment);
  base_ = segment_->data();
  rank_states_ = reinterpret_cast<RankState*>(base_ + layout_.rank_states);
  own_state_ = &rank_states_[rank_];
  abort_state_ = std::move(joined.abort_state);
  failure_detector_ = std::move(joined.failure_detector);
  CoreSet shared;  // by the ranks
  std::vector<CoreSet> cores;
  for (const PeerInfo& it : joined.ranks) shared |= it.cores, cores.push_back(it.cores);
  const auto all = static_cast<int>(std::thread::hardware_concurrency());
  crowded_ = world_ > (shared.any() ? static_cast<int>(shared.count()) : all);
  const int share = core_share(numa_nodes(), cores, rank_);
  fold_threads_ = share > 0 ? share : std::max(1, all / world_);
  publish_core();
}

// Calls `f` with the offset of each region of these ranks' staging buffers.
template <class F>
void Group::each_region(uint64_t ranks, const StagingRegions& all, const F& f) const {
  for (Rank r = 0; r < world_; ++r)
    for (std::size_t i = 0; (ranks >> r & 1) != 0 && i < all.count; ++i)
      for (const uint64_t buffer : {0, 1})
        f(layout_.staging_buffer(r, buffer) + all.begin + i * all.stride);
}

bool Group::reserve_staging(uint64_t ranks, const StagingRegions& wanted) {
  const std::size_t bytes =
      std::min(std::bit_ceil(std::max(wanted.bytes, kLeastReserved)), wanted.stride);
  constexpr std::size_t kPage = SegmentLayout::kPage;
  const std::size_t first_page = layout_.staging_buffers / kPage;
  reserved_.resize(layout_.heaps / kPage - first_page);
  bool grown = false;
  each_region(ranks, wanted, [&](std::size_t begin) {
    const std::size_t last = (begin + bytes + kPage - 1) / kPage;
    std::size_t page = begin / kPage;
    while (page < last && reserved_[page - first_page]) ++page;
    if (page == last) return;
    segment_->commit(page * kPage, (last - page) * kPage);
    for (; page < last; ++page) reserved_[page - first_page] = true;
    grown = true;
  });
  return grown;
}

void Group::map_staging(uint64_t ranks, const StagingRegions& regions) const {
  each_region(ranks, regions, [&](std::size_t begin) { segment_->touch(begin, regions.bytes); });
}

uint64_t Group::left() const {
  uint64_t left = 0;
  for (Rank r = 0; r < world_; ++r)
    if (rank_states_[r].left.load(std::memory_order_acquire) != 0) left |= uint64_t{1} << r;
  return left;
}

Group::~Group() { leave(); }

void Group::leave(uint32_t how) noexcept {
  if (fork_guard_.forked()) return;
  uint32_t present = 0;
  own_state_->left.compare_exchange_strong(present, how);
  wake_all();
}

void Group::require_healthy(const OpContext& context) const {
  if (fork_guard_.forked()) [[unlikely]]
    throw CollectiveError(text(abort_state_->name(context),
                               ": this process is a forked child of rank ", world_rank(rank_),
                               ", and not a rank itself; create another group in it"));
  if (abort_state_->is_aborted()) [[unlikely]]
    abort_state_->rethrow(context);
}

void Group::abort(const std::string& why) {
  if (fork_guard_.forked()) return;
  abort({AbortRecord::lost, text("rank ", world_rank(rank_), " aborted the group: ", why), call()});
}

void Group::abort(const AbortCause& cause) {
  abort_state_->set(cause, nullptr);
  wake_all();
}

void Group::leave_call() {
  if (fork_guard_.forked() || is_healthy()) return;
  abort({.first_call = call()});  // keeps the cause
}

void Group::abort_if_died() {
  const uint64_t died = dead() & ~left();
  if (died != 0) abort({AbortRecord::lost, named(died, " died", " died")});
}

// Names the ranks of a mask, followed by one of two words.
std::string Group::named(uint64_t mask, const char* singular, const char* plural) const {
  const std::vector<Rank> ranks = world_ranks(ranks_of(mask));
  return name(ranks) + (ranks.size() == 1 ? singular : plural);
}

void Group::fail(uint32_t kind, const std::string& cause, const OpContext& context) {
  abort_state_->set({kind, cause, call()}, &context);
  wake_all();
  abort_state_->rethrow(context);
}

void Group::wake_all() const {
  for (Rank r = 0; r < world_; ++r) wake_sleepers(rank_states_[r].progress);
}

namespace {

// How long to spin, if the awaited rank has a core of its own. Yielding earlier made the scheduler
// put both ranks on one core (1.5 us an exchange instead of 0.18). 20 to 100 us measured alike.
constexpr std::chrono::microseconds kSpinTime{50};
// Pauses between checks of the clock and of core sharing: longer than an exchange takes.
constexpr int kPausesPerCheck = 32;
// Pauses of a spin with more ranks than cores, when the awaited rank is probably not running. 0 and
// 20 measured alike; 200 made a small all_reduce of 4 ranks on 2 cores 3 times as slow.
constexpr int kPausesWhenCrowded = 16;
constexpr int kYieldsPerCheck = 8;  // yields per clock read, which costs a tenth of a yield
// The longest sleep between checks: a twentieth of the second within which a death must be
// detected.
constexpr std::chrono::milliseconds kMaxSleep{50};
// A wait that no peer wakes sleeps for 1/50 of the time that it has lasted: it ends at most 1/50
// too late, and a long wait uses no core. Sleeps of less than 50 us would take as long, because the
// kernel's timers are 50 us late.
constexpr int kWaitedPerSleep = 50;
constexpr std::chrono::microseconds kShortestSleep{50};
constexpr std::chrono::milliseconds kLongestSleep{2};

std::string seconds(std::chrono::nanoseconds time) {
  std::array<char, 32> digits;
  std::snprintf(digits.data(), digits.size(), "%.1f s",
                std::chrono::duration<double>(time).count());
  return digits.data();
}

// Spins for a short time; returns true if `ready` held. `must_yield` returns true if the
// awaited rank cannot run while this thread spins.
template <class Ready, class MustYield>
bool spin(bool crowded, const Ready& ready, const MustYield& must_yield) {
  if (crowded) {
    for (int i = 0; i < kPausesWhenCrowded; ++i, pause())
      if (ready()) return true;
    return false;
  }
  for (Deadline end = Deadline::max();;) {
    for (int i = 0; i < kPausesPerCheck; ++i, pause())
      if (ready()) return true;
    const auto now = Clock::now();  // not read earlier: most waits end within the first pauses
    if (end == Deadline::max()) end = now + kSpinTime;
    if (now >= end || must_yield()) return false;
  }
}

}  // namespace

// A wait after `spin`: first spins on or yields the core, and sleeps only when it has lasted long.
// Meanwhile it looks whether it must fail.
class Group::Wait {
 public:
  struct Condition {
    FunctionRef<bool()> ready;
    // Ranks whose death would, at that moment, end the wait with an error; ranks to name in a
    // timeout. Those from `world()` on are elsewhere.
    FunctionRef<std::vector<Rank>()> suspects, late;
    FunctionRef<bool()> must_yield;  // whether the awaited rank cannot run while this thread spins
    FunctionRef<void(std::chrono::nanoseconds waited)> sleep;
    FunctionRef<void()> check = {};  // may throw
    bool in_call = false;            // an abort that spares this rank's call does not end the wait
  };
  Wait(Group& group, const Condition& until, const OpContext& context)
      : group_(group), until_(until), context_(context) {}

  // Returns when the condition holds. Throws PeerLost or Timeout if the group is aborted, a suspect
  // is gone or the time is over.
  void run() {
    for (auto now = begin_, checked = begin_; now - begin_ < group_.settings_.yield_time;
         now = Clock::now()) {
      if (now - checked >= kCheckInterval) check(checked = now);
      const bool spins = now - begin_ < kSpinTime;
      for (int i = 0; i < kYieldsPerCheck; ++i) {
        if (!spins || until_.must_yield())
          sched_yield();
        else
          for (int p = 0; p < kPausesPerCheck && !until_.ready(); ++p) pause();
        if (until_.ready()) return;
      }
    }
    while (!until_.ready()) {
      const auto now = Clock::now();
      check(now);
      until_.sleep(now - begin_);
    }
  }

 private:
  // What the wait is for may have come before the abort, or before a suspect was gone, so `ready`
  // is always checked last.
  void check(Deadline now) {
    const bool aborted = until_.in_call ? !group_.can_run() : !group_.is_healthy();
    if (aborted && !until_.ready()) group_.abort_state_->rethrow(context_);
    find_lost();
    if (until_.check) until_.check();
    if (now >= signals_due_ && group_.settings_.check_signals) {
      signals_due_ = now + kSignalInterval;
      group_.settings_.check_signals();
    }
    if (now >= context_.deadline) time_out(now);
  }

  void find_lost() {
    const uint64_t dead = group_.dead();
    const uint64_t left = group_.left() & ~(uint64_t{1} << group_.rank_);  // after `dead`
    if ((dead | left) == 0) return;
    uint64_t suspects = 0;
    for (const Rank r : until_.suspects())
      if (r < group_.world_) suspects |= uint64_t{1} << r;
    const uint64_t died = suspects & dead & ~left, departed = suspects & left;
    if ((died | departed) == 0 || until_.ready()) return;
    if (died == 0)
      fail(AbortRecord::lost, text(group_.named(departed, " has", " have"), " left the group"));
    std::string pids;
    for (const Rank r : ranks_of(died))
      pids += text(pids.empty() ? "" : ", ", group_.failure_detector_->pid(r));
    const uint64_t alive = ~(dead | left) & (~uint64_t{0} >> (64 - group_.world_));
    fail(AbortRecord::lost, text(group_.named(died, " (pid ", " (pids "), pids, ") died; ",
                                 group_.named(alive, " is", " are"), " alive"));
  }

  void time_out(Deadline now) {
    const std::vector<Rank> late = until_.late();
    if (until_.ready()) return;
    const std::string missing =
        late.empty() ? "" : text("; ", name(group_.world_ranks(late)), " did not arrive");
    const Deadline begun = std::min(begin_, context_.begun);
    fail(AbortRecord::timed_out, text("Timed out after ", seconds(now - begun), missing));
  }

  [[noreturn]] void fail(uint32_t kind, const std::string& cause) {
    group_.fail(kind, cause, context_);
  }

  Group& group_;
  const Condition& until_;
  const OpContext& context_;
  const Deadline begin_ = Clock::now();
  Deadline signals_due_ = begin_ + kSignalInterval;
};

void Group::await_slowly(Rank r, uint64_t wanted, const std::atomic<uint64_t>& polled,
                         const OpContext& context) {
  const auto ready = [&] { return has_reached(r, wanted, polled); };
  if (!crowded_ && spin(false, ready, [&] { return shares_core(r); })) return;
  // Suspects are all ranks that have not finished the run of `wanted`: if one of them is gone, no
  // rank can finish the run.
  const uint64_t end = at_run(((wanted - 1) >> kTaskBits) + 1);
  const auto suspects = [&] { return behind(end); };
  const auto late = [&] { return last_behind(wanted); };
  const auto must_yield = [&] { return !crowded_ || shares_core(r); };
  const auto sleep = [&](std::chrono::nanoseconds) {
    sleep_for(r, wanted,
              std::min<std::chrono::nanoseconds>(kMaxSleep, context.deadline - Clock::now()));
  };
  Wait(*this, {ready, suspects, late, must_yield, sleep, {}, true}, context).run();
}

void Group::await(FunctionRef<bool()> ready, const WaitHooks& hooks, const OpContext& context) {
  if (spin_for(ready)) return;
  const auto must_yield = [] { return true; };
  const auto sleep = [&](std::chrono::nanoseconds waited) {
    if (hooks.back_off) return hooks.back_off();
    std::this_thread::sleep_for(std::clamp<std::chrono::nanoseconds>(
        waited / kWaitedPerSleep, kShortestSleep, kLongestSleep));
  };
  Wait(*this, {ready, hooks.missing, hooks.missing, must_yield, sleep, hooks.check}, context).run();
}

bool Group::spin_for(FunctionRef<bool()> ready) {
  return spin(crowded_, ready, [this] { return shares_core({}); });
}

std::vector<Rank> Group::behind(uint64_t goal) const {
  std::vector<Rank> ranks;
  for (Rank r = 0; r < world_; ++r)
    if (r != rank_ && !reached(rank_states_[r].progress.load(std::memory_order_acquire), goal) &&
        !reached(rank_states_[r].ended.load(std::memory_order_acquire), goal))
      ranks.push_back(r);
  return ranks;
}

// Returns the ranks furthest behind `goal`, for which the others may be waiting.
std::vector<Rank> Group::last_behind(uint64_t goal) const {
  std::vector<Rank> last;
  uint64_t least = goal;
  for (Rank r = 0; r < world_; ++r) {
    const uint64_t progress = rank_states_[r].progress.load(std::memory_order_acquire);
    if (r == rank_ || reached(progress, goal)) continue;
    if (progress != least && reached(least, progress)) last.clear(), least = progress;
    if (progress == least) last.push_back(r);
  }
  return last;
}

// Publishes in `on_core` the core on which this rank runs, and returns that value.
int32_t Group::publish_core() {
  const int32_t here = sched_getcpu() + 1;
  std::atomic<int32_t>& mine = own_state_->on_core;
  if (mine.load(std::memory_order_relaxed) != here) mine.store(here, std::memory_order_relaxed);
  return here;
}

// Returns true if a peer that needs the core last ran on this rank's core, as when another program
// occupies a core. While one rank spins there the other cannot run, and the scheduler does not
// separate them.
//
// If this rank waits for another one, `awaited`, a peer needs the core if it is `awaited` or has
// progressed less than this rank. Otherwise all ranks on this core are waiting, most often for the
// same rank, which runs on another core and arrives before each of them has polled once. So each
// rank yields the core once per call (measured with 2 to 8 ranks on 2 cores), and a small
// all_reduce of 4 ranks is a quarter faster, in Python a third.
bool Group::shares_core(std::optional<Rank> awaited) {
  const int32_t here = publish_core();
  const uint64_t own = own_state_->progress.load(std::memory_order_relaxed);
  for (Rank r = 0; r < world_; ++r)
    if (r != rank_ && rank_states_[r].on_core.load(std::memory_order_relaxed) == here &&
        (!awaited || r == *awaited ||
         !reached(rank_states_[r].progress.load(std::memory_order_acquire), own)))
      return true;
  return false;
}

void Group::sleep_for(Rank r, uint64_t wanted, std::chrono::nanoseconds at_most) {
  RankState& awaited = rank_states_[r];
  awaited.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint64_t seen = awaited.progress.load(std::memory_order_seq_cst);
  if (!reached(seen, wanted) && can_run()) sleep_on(awaited.progress, seen, at_most);
  awaited.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace pycollect::ipc
