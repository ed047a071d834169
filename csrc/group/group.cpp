#include "group.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <thread>

#include "../bootstrap/rendezvous.h"
#include "../plan/error.h"
#include "format_ranks.h"

namespace pycollect::ipc {
namespace {

// The least that a region of a staging buffer grows to: small calls of many regions touch a page of
// each. Growing further takes 20 us each time.
constexpr std::size_t kLeastReserved = 256;

int checked_world(Rank rank, int world, bool one_host) {
  require(world >= 1 && (world <= kMaxRanks || !one_host), "a pycollect group has 1 to ", kMaxRanks,
          " ranks on one host, not ", world);
  require(rank >= 0 && rank < world, "rank ", rank, " is not in a group of ", world,
          " ranks: the rank must be 0 to ", world - 1);
  return world;
}

// Returns `sizes` if none exceeds kMostBytes. Throws std::invalid_argument otherwise.
SegmentSizes checked(const SegmentSizes& sizes) {
  for (const auto& [what, bytes] : {std::pair{"buffer_bytes", sizes.buffer_bytes},
                                    {"mailbox_bytes", sizes.mailbox_bytes},
                                    {"symmetric_heap_bytes", sizes.symmetric_heap_bytes}})
    require(bytes <= kMostBytes, what, " is ", bytes, "; it must be at most ", kMostBytes);
  return sizes;
}

}  // namespace

Group::Group(Store& store, Rank rank, int world, GroupSettings settings)
    : rank_(rank),
      world_(checked_world(rank, world, settings.one_host)),
      settings_(std::move(settings)),
      layout_(checked({world, settings_.buffer_bytes, settings_.mailbox_bytes,
                       settings_.symmetric_heap_bytes, settings_.all_ranks})),
      seen_(std::make_unique<std::atomic<uint64_t>[]>(world)) {
  try {
    rendezvous(store);
  } catch (const std::exception& error) {  // peers may have seen this rank in the shared memory
    if (abort_state_)
      abort_state_->set(
          {AbortRecord::lost, text("rank ", world_rank(rank_), " gave up: ", error.what())},
          nullptr);
    throw;
  }
}

void Group::rendezvous(Store& store) {
  Rendezvous exchange(store, rank_, world_, settings_, {abort_state_, failure_detector_});
  const auto prepare = [&](std::shared_ptr<Segment> segment, uint64_t nonce) {
    map_segment(std::move(segment));
    Control& control = *reinterpret_cast<Control*>(base_);
    control.nonces[rank_].store(nonce);
    failure_detector_ = std::make_unique<FailureDetector>(control, world_, rank_);
    if (rank_ == 0) commit();
  };
  const std::vector<PeerInfo> ranks = exchange.share(layout_.total, prepare);
  require_one_memory(ranks);
  crowded_ = world_ > (settings_.cores > 0 ? settings_.cores : shared_cores(ranks));
  fold_threads_ = ipc::fold_threads(ranks, rank_);
  segment_->touch(0, used_at_once());  // all ranks have joined, so rank 0 has committed it
  publish_core();
}

void Group::map_segment(std::shared_ptr<Segment> segment) {
  segment_ = std::move(segment);
  base_ = segment_->data();
  rank_states_ = reinterpret_cast<RankState*>(base_ + layout_.rank_states);
  segment_->commit(0, SegmentLayout::up(sizeof(Control)));
  abort_state_ =
      std::make_unique<AbortState>(reinterpret_cast<Control*>(base_)->record, settings_.name);
}

// Commits what every group uses. Staging buffers and the rings of the mailboxes are committed when
// they are first used, by the rank that writes them: their pages then lie on the NUMA node where
// that rank runs. The caller must hold the liveness lock, because the kernel may kill the process
// here for lack of memory.
void Group::commit() { segment_->commit(0, used_at_once()); }

bool Group::reserve_staging(uint64_t ranks, const StagingRegions& wanted) {
  if (wanted == last_reserved_ && (ranks & ~last_reserved_ranks_) == 0) return false;
  const std::size_t bytes =
      std::min(std::bit_ceil(std::max(wanted.bytes, kLeastReserved)), wanted.stride);
  bool grown = false;
  for (Rank r = 0; r < world_; ++r)
    for (std::size_t i = 0; (ranks >> r & 1) != 0 && i < wanted.count; ++i)
      for (const uint64_t buffer : {0, 1}) {
        const std::size_t begin =
            layout_.staging_buffer(r, buffer) + wanted.begin + i * wanted.stride;
        grown |= reserve_pages(begin, begin + bytes);
      }
  last_reserved_ = wanted;
  last_reserved_ranks_ = ranks;
  return grown;
}

bool Group::reserve_pages(std::size_t begin, std::size_t end) {
  constexpr std::size_t kPage = SegmentLayout::kPage;
  const std::size_t first_page = layout_.staging_buffers / kPage, last = (end + kPage - 1) / kPage;
  reserved_.resize(layout_.heaps / kPage - first_page);
  std::size_t page = begin / kPage;
  while (page < last && reserved_[page - first_page]) ++page;
  if (page == last) return false;
  segment_->commit(page * kPage, (last - page) * kPage);
  segment_->touch(page * kPage, (last - page) * kPage);
  for (; page < last; ++page) reserved_[page - first_page] = true;
  return true;
}

void Group::map_staging(uint64_t ranks, const StagingRegions& regions) const {
  for (Rank r = 0; r < world_; ++r)
    for (const uint64_t buffer : {0, 1})
      for (std::size_t i = 0; (ranks >> r & 1) != 0 && i < regions.count; ++i)
        segment_->touch(layout_.staging_buffer(r, buffer) + regions.begin + i * regions.stride,
                        regions.bytes);
}

void Group::require_one_memory(const std::vector<PeerInfo>& ranks) const {
  const Control& control = *reinterpret_cast<const Control*>(base_);
  for (Rank r = 0; r < world_; ++r)
    if (control.nonces[r].load() != ranks[r].nonce)
      throw CollectiveError(
          text("the ranks of group '", settings_.name,
               "' mapped different shared memory; all ranks must be on one host"));
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
  rank_states_[rank_].left.compare_exchange_strong(present, how);
  wake_all();
}

FingerprintDetails& Group::fingerprint_details(Rank r, uint64_t call) const {
  return *reinterpret_cast<FingerprintDetails*>(base_ + layout_.fingerprint_details(r, call));
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
  abort({AbortRecord::lost, text("rank ", world_rank(rank_), " aborted the group: ", why),
         call_begin()});
}

void Group::abort(const AbortCause& cause) {
  abort_state_->set(cause, nullptr);
  wake_all();
}

void Group::leave_call() {
  if (fork_guard_.forked() || is_healthy()) return;
  abort({.first_run = call_begin()});  // keeps the cause
}

void Group::abort_if_died() {
  const uint64_t died = dead() & ~left();
  if (died == 0) return;
  std::vector<Rank> ranks;
  for (Rank r = 0; r < world_; ++r)
    if ((died >> r & 1) != 0) ranks.push_back(world_rank(r));
  abort({AbortRecord::lost, text(name(ranks), " died")});
}

void Group::fail(uint32_t kind, const std::string& cause, const OpContext& context) {
  abort_state_->set({kind, cause, call_begin()}, &context);
  wake_all();
  abort_state_->rethrow(context);
}

void Group::wake_all() const {
  for (Rank r = 0; r < world_; ++r) wake_sleepers(rank_states_[r].progress);
}

// Slow path of Group::await: the wait monitor and its error messages.
namespace {

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

}  // namespace

// Wait monitor: polls abort state, liveness and deadline during one wait.
class Group::WaitMonitor {
 public:
  using Suspects = std::function<std::vector<Rank>()>;
  // `suspects` returns the ranks whose death would, at that moment, end the wait with an error;
  // `late` returns the ranks to name in a timeout.
  struct WaitRequest {
    std::function<bool()> ready;
    Suspects suspects, late;
    std::function<void()> check = {};
    bool in_call = false;  // an abort that spares this rank's call does not end the wait
  };
  WaitMonitor(Group& group, const WaitRequest& request, const OpContext& context)
      : group_(group), request_(request), context_(context) {}

  // Throws PeerLost or Timeout if the group is aborted, a suspect is gone or the time is over.
  void check(Deadline now) {
    check_aborted();
    const uint64_t dead = group_.failure_detector_->dead();
    const uint64_t left = group_.left() & ~dead & ~(uint64_t{1} << group_.rank_);
    if ((dead | left) != 0) find_lost(dead, left);
    if (request_.check) request_.check();
    if (now >= signals_due_ && group_.settings_.check_signals) {
      signals_due_ = now + kSignalInterval;
      group_.settings_.check_signals();
    }
    if (now >= context_.deadline) time_out(now);
  }

  std::chrono::nanoseconds remaining() const { return context_.deadline - Clock::now(); }

 private:
  // What the wait is for may have come before the abort.
  void check_aborted() const {
    const bool aborted = request_.in_call ? !group_.can_run() : !group_.is_healthy();
    if (aborted && !request_.ready()) group_.abort_state_->rethrow(context_);
  }

  // Fails if a suspect has died or left. A suspect may have made `ready` hold before that, so
  // `ready` is checked last.
  void find_lost(uint64_t dead, uint64_t left) {
    std::vector<Rank> died, departed;
    for (Rank r : request_.suspects()) {
      if (r >= group_.world_) continue;
      if ((dead >> r & 1) != 0 && group_.rank_states_[r].left.load() == 0)
        died.push_back(r);
      else if (((dead | left) >> r & 1) != 0)
        departed.push_back(r);
    }
    if ((died.empty() && departed.empty()) || request_.ready()) return;
    fail(AbortRecord::lost,
         died.empty()
             ? text(named(departed), departed.size() == 1 ? " has" : " have", " left the group")
             : text(with_pids(died), " died", alive(dead | left)));
  }

  std::string named(const std::vector<Rank>& ranks) const {
    return name(group_.world_ranks(ranks));
  }

  std::string with_pids(const std::vector<Rank>& ranks) const {
    std::string pids;
    for (Rank r : ranks) pids += text(pids.empty() ? "" : ", ", group_.failure_detector_->pid(r));
    return text(named(ranks), ranks.size() == 1 ? " (pid " : " (pids ", pids, ")");
  }

  std::string alive(uint64_t gone) const {
    std::vector<Rank> alive;
    for (Rank r = 0; r < group_.world_; ++r)
      if ((gone >> r & 1) == 0) alive.push_back(r);
    return text("; ", named(alive), alive.size() == 1 ? " is" : " are", " alive");
  }

  void time_out(Deadline now) {
    const std::vector<Rank> late = request_.late();
    if (request_.ready()) return;
    const std::string missing = late.empty() ? "" : text("; ", named(late), " did not arrive");
    const Deadline begun = std::min(begin_, context_.begun);
    fail(AbortRecord::timed_out, text("Timed out after ", seconds(now - begun), missing));
  }

  [[noreturn]] void fail(uint32_t kind, const std::string& cause) {
    group_.fail(kind, cause, context_);
  }

  Group& group_;
  const WaitRequest& request_;
  const OpContext& context_;
  Deadline begin_ = Clock::now();
  Deadline signals_due_ = begin_ + kSignalInterval;
};

void Group::await_slowly(Rank r, uint64_t wanted, const std::atomic<uint64_t>& polled,
                         const OpContext& context) {
  const auto ready = [&] { return has_reached(r, wanted, polled); };
  if (!crowded_ && spin(false, ready, [&] { return shares_core_with(r); })) return;
  // Suspects are all ranks that have not finished the run of `wanted`: if one of them is gone, no
  // rank can finish the run.
  const uint64_t end = at_run(((wanted - 1) >> kTaskBits) + 1);
  const WaitMonitor::WaitRequest request{.ready = ready,
                                         .suspects = [&] { return behind(end); },
                                         .late = [&] { return last_behind(wanted); },
                                         .in_call = true};
  WaitMonitor monitor(*this, request, context);
  wait(
      ready, [&] { return !crowded_ || shares_core_with(r); },
      [&](Deadline now) { monitor.check(now); },
      [&](std::chrono::nanoseconds) {
        sleep_for(r, wanted, std::min<std::chrono::nanoseconds>(kMaxSleep, monitor.remaining()));
      },
      settings_.yield_time);
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
  std::atomic<int32_t>& mine = rank_states_[rank_].on_core;
  if (mine.load(std::memory_order_relaxed) != here) mine.store(here, std::memory_order_relaxed);
  return here;
}

// Returns true if a peer last ran on this rank's core, as when another program occupies a core.
// While one rank spins there the other cannot run, and the scheduler does not separate them.
bool Group::shares_core() {
  const int32_t here = publish_core();
  for (Rank r = 0; r < world_; ++r)
    if (r != rank_ && rank_states_[r].on_core.load(std::memory_order_relaxed) == here) return true;
  return false;
}

// Returns true if a peer on this core is `awaited` or has progressed less than this rank, so that
// it needs the core. Otherwise all ranks on this core are waiting, most often for the same rank,
// which runs on another core and arrives before each of them has polled once. So each rank yields
// the core once per call (measured with 2 to 8 ranks on 2 cores), and a small all_reduce of 4 ranks
// is a quarter faster, in Python a third.
bool Group::shares_core_with(Rank awaited) {
  const int32_t here = publish_core();
  const uint64_t own = rank_states_[rank_].progress.load(std::memory_order_relaxed);
  for (Rank r = 0; r < world_; ++r)
    if (r != rank_ && rank_states_[r].on_core.load(std::memory_order_relaxed) == here &&
        (r == awaited || !reached(rank_states_[r].progress.load(std::memory_order_acquire), own)))
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

bool Group::spin_for(const std::function<bool()>& ready) {
  return spin(crowded_, ready, [this] { return shares_core(); });
}

void Group::await(const std::function<bool()>& ready, const WaitHooks& hooks,
                  const OpContext& context) {
  if (spin_for(ready)) return;
  const WaitMonitor::WaitRequest request{ready, hooks.missing, hooks.missing, hooks.check};
  WaitMonitor monitor(*this, request, context);
  wait(
      ready, [] { return true; }, [&](Deadline now) { monitor.check(now); },
      [&](std::chrono::nanoseconds waited) {
        if (hooks.back_off) return hooks.back_off();
        std::this_thread::sleep_for(std::clamp<std::chrono::nanoseconds>(
            waited / kWaitedPerSleep, kShortestSleep, kLongestSleep));
      },
      settings_.yield_time);
}

}  // namespace pycollect::ipc
