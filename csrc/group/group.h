// The ranks of one group, each a process on the same host: their shared memory, failure detection,
// and waits that throw instead of hanging when a peer dies.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "failures.h"
#include "segment.h"
#include "segment_layout.h"
#include "system.h"
#include "wait.h"

namespace pycollect::ipc {

class Store;

// Settings of a group. The sizes and `common_settings` must be equal on all ranks.
struct GroupSettings {
  std::string name = "default";  // the group's name in messages
  std::chrono::milliseconds timeout{30 * 60 * 1000};
  // Sizes of parts of the segment, as in SegmentSizes. Of the last four, 0 omits the part.
  std::size_t buffer_bytes = 512 << 10;
  std::size_t mailbox_bytes = 0;
  std::size_t mailbox_header_bytes = 0;  // committed with the group; the rest when it is used
  std::size_t symmetric_heap_bytes = 0;
  std::size_t exposed_bytes = 0;
  // Other settings that must be equal on all ranks, as text: " name=value" each.
  std::string common_settings = {};
  // The ranks' numbers in a world of several hosts, then those of ranks on other hosts; empty: the
  // group is the world.
  std::vector<int> world_ranks = {};
  bool one_host = true;  // false: ranks on several hosts are no error, but SeveralHosts
  // How long a waiting rank yields its core before it sleeps.
  std::chrono::microseconds yield_time = kYieldTime;
  // Called by waiting threads every kSignalInterval, and may throw: for signals that the user's
  // program handles. Null: none.
  void (*check_signals)() = nullptr;
  // Segment of SegmentLayout::total bytes that is mapped already, for ranks that are threads of one
  // process: in one mapping, a sanitizer sees the accesses of all ranks. Null: rank 0 creates it.
  std::shared_ptr<Segment> segment = {};
};

class Group {
 public:
  // Returns when all ranks share the memory and have read each other's nonce in it. Throws
  // std::invalid_argument, on all ranks alike and naming the hosts, when the ranks are not on one
  // host; Timeout, naming the missing ranks; PeerLost when a rank has died or failed.
  Group(Store& store, Rank rank, int world, GroupSettings settings);
  ~Group();
  // Publishes that this rank has left: a peer that still waits for it throws.
  void leave(uint32_t how = RankState::has_left) noexcept;

  Rank rank() const { return rank_; }
  int world() const { return world_; }
  // The number of ranks in the world.
  int all_ranks() const { return std::max<int>(world_, settings_.world_ranks.size()); }
  // With how many threads this rank should fold: its share of the cores of its NUMA nodes.
  int fold_threads() const { return fold_threads_; }
  // The rank's number in the world, of which this group may be the part on one host.
  Rank world_rank(Rank r) const {
    return settings_.world_ranks.empty() ? r : settings_.world_ranks[r];
  }
  std::vector<Rank> world_ranks(std::vector<Rank> ranks) const {
    for (Rank& r : ranks) r = world_rank(r);
    return ranks;
  }
  const GroupSettings& settings() const { return settings_; }
  const SegmentLayout& layout() const { return layout_; }
  // Regions of a staging buffer: `count` regions, `stride` bytes apart, of which `bytes` are used.
  struct StagingRegions {
    std::size_t begin = 0, count = 0, stride = 0, bytes = 0;
    bool operator==(const StagingRegions&) const = default;
  };
  // Commits regions in the staging buffers of these ranks (a mask), which this rank is going to
  // write, unless it has done so before. A region grows by doubling, so that calls of growing size
  // commit rarely. Returns whether anything was committed; throws as Segment::commit.
  bool reserve_staging(uint64_t ranks, const StagingRegions& wanted);
  // Maps regions that these ranks (a mask) have committed into this process.
  void map_staging(uint64_t ranks, const StagingRegions& regions) const;
  RankState& rank_state(Rank r) const { return rank_states_[r]; }
  RankState& own_state() const { return *own_state_; }
  FingerprintDetails& fingerprint_details(Rank r, uint64_t call) const {
    return *reinterpret_cast<FingerprintDetails*>(base_ + layout_.fingerprint_details(r, call));
  }
  std::byte* staging_buffer(Rank r, uint64_t run) const {
    return base_ + layout_.staging_buffer(r, run);
  }
  std::byte* mailboxes() const { return base_ + layout_.mailboxes; }
  std::byte* heap(Rank r) const { return base_ + layout_.heap(r); }
  // Exposed memory: a rank writes its own, of which it commits what it uses; the others read it.
  std::byte* exposed(Rank r) const { return base_ + layout_.exposed(r); }
  // Holding the segment keeps the shared memory mapped, as an allocator of the symmetric heap does.
  const std::shared_ptr<Segment>& segment() const { return segment_; }

  CallEntry& entry(Rank r, uint64_t call) const { return rank_states_[r].entries[call & 1]; }
  CallEntry& own_entry(uint64_t call) const { return own_state_->entries[call & 1]; }
  // Publishes this rank's progress counter, and wakes the threads that sleep until it advances.
  void advance(uint64_t progress);
  // The same at the entry of a call, whose CallEntry is complete.
  void enter(uint64_t call, uint64_t progress) {
    own_entry(call).progress.store(progress, std::memory_order_release);
    advance(progress);
  }
  // Returns true if `r`'s counter has reached `wanted`. Rereads the counter only if the value last
  // seen is lower.
  bool has_reached(Rank r, uint64_t wanted) {
    return has_reached(r, wanted, rank_states_[r].progress);
  }
  // Waits until `r`'s counter reaches `wanted`. Throws PeerLost when `r`, or any rank that has not
  // finished the run, has died or left; Timeout at the deadline. Either exception names the
  // operation and all missing ranks, and aborts the group: every later operation throws it again.
  void await(Rank r, uint64_t wanted, const OpContext& context) {
    const std::atomic<uint64_t>& polled = rank_states_[r].progress;
    if (!has_reached(r, wanted, polled)) await_slowly(r, wanted, polled, context);
  }
  void await_peers(uint64_t wanted, const OpContext& context) {
    for (Rank r = 0; r < world_; ++r)
      if (r != rank_) await(r, wanted, context);
  }
  // The same for the entry of `r` into the call. Returns its CallEntry, which is then complete.
  const CallEntry& await_entry(Rank r, uint64_t wanted, const OpContext& context) {
    const CallEntry& its = entry(r, context.call);
    if (!has_reached(r, wanted, its.progress)) await_slowly(r, wanted, its.progress, context);
    return its;
  }
  struct WaitHooks {
    // Returns the ranks that the condition depends on. Those from `world()` on are elsewhere, and
    // are only named.
    FunctionRef<std::vector<Rank>()> missing;
    FunctionRef<void()> check = {};     // called every kCheckInterval or so, and may throw
    FunctionRef<void()> back_off = {};  // replaces sleeping; must return in some milliseconds
  };
  // Polls `ready`, any condition on the shared memory, until it holds; throws as the other `await`.
  // No peer wakes this wait, so it sleeps briefly.
  void await(FunctionRef<bool()> ready, const WaitHooks& hooks, const OpContext& context);
  // Polls `ready` as the first stage of `await` does, spinning for longer if every rank has a core
  // of its own. Returns true if `ready` held.
  bool spin_for(FunctionRef<bool()> ready);

  // Masks with bit r set if rank r has died, has destroyed its group, or either.
  uint64_t dead() const { return failure_detector_->dead(); }
  uint64_t left() const;
  uint64_t gone() const { return dead() | left(); }

  bool is_healthy() const { return !abort_state_->is_aborted(); }
  // Number of this rank's next run, derived from its counters in the shared memory.
  uint64_t run_number() const {
    const uint64_t progress = own_state_->progress.load(std::memory_order_acquire);
    const uint64_t ended = own_state_->ended.load(std::memory_order_acquire);
    return (reached(ended, progress) ? ended : progress) >> kTaskBits;
  }
  // Called when this rank begins a call. Throws as require_run.
  void begin_call(const OpContext& context) {
    end_call(context.shown, run_number());
    require_run(context);
  }
  // Called when this rank has finished a call. Its next one has this number, and begins with `run`.
  void end_call(uint64_t next, uint64_t run) {
    call_.store(next, std::memory_order_relaxed);
    call_begin_.store(run, std::memory_order_relaxed);
  }
  // The call that this rank is in, or its next one: its number and its first run.
  uint64_t call() const { return call_.load(std::memory_order_relaxed); }
  uint64_t call_begin() const { return call_begin_.load(std::memory_order_relaxed); }
  // Whether this rank can finish its call: an abort spares the calls that all ranks can finish.
  bool can_run() const { return is_healthy() || !abort_state_->ends(call()); }
  AbortCause abort_cause() const { return abort_state_->cause(); }  // of an aborted group
  // Throws the abort cause if the group is aborted, or CollectiveError in a forked child of a rank.
  void require_healthy(const OpContext& context) const;
  // The same, unless this rank can finish its call.
  void require_run(const OpContext& context) const {
    if (fork_guard_.forked() || !can_run()) [[unlikely]]
      require_healthy(context);
  }
  // Aborts the group from any thread: all waiting ranks throw, and later calls. Calls that this
  // rank has finished return on the other ranks, too; on other hosts if their data has arrived.
  void abort(const std::string& why);
  void abort(const AbortCause& cause);
  // Called when this rank's call has failed because the group is aborted: no rank can finish it.
  void leave_call();
  // Aborts the group if a rank has died without leaving it, although no rank may wait for it.
  void abort_if_died();
  // Aborts the group with a cause that a rank found in an operation, and throws it. `kind`: lost or
  // timed_out.
  [[noreturn]] void fail(uint32_t kind, const std::string& cause, const OpContext& context);

 private:
  class Wait;  // defined in group.cpp
  template <class F>
  void each_region(uint64_t ranks, const StagingRegions& all, const F& f) const;
  std::string named(uint64_t mask, const char* singular, const char* plural) const;
  int32_t publish_core();
  bool shares_core(std::optional<Rank> awaited);
  std::vector<Rank> behind(uint64_t goal) const;
  std::vector<Rank> last_behind(uint64_t goal) const;
  void sleep_for(Rank r, uint64_t wanted, std::chrono::nanoseconds at_most);
  bool has_reached(Rank r, uint64_t wanted, const std::atomic<uint64_t>& polled);
  void await_slowly(Rank r, uint64_t wanted, const std::atomic<uint64_t>& polled,
                    const OpContext& context);
  void wake_all() const;

  Rank rank_;
  int world_;
  GroupSettings settings_;
  SegmentLayout layout_;
  ForkGuard fork_guard_;
  bool crowded_ = false;  // more ranks than cores
  int fold_threads_ = 1;
  std::shared_ptr<Segment> segment_;
  std::byte* base_ = nullptr;
  RankState *rank_states_ = nullptr, *own_state_ = nullptr;
  std::atomic<uint64_t> call_{0}, call_begin_{0};
  std::unique_ptr<AbortState> abort_state_;
  std::unique_ptr<FailureDetector> failure_detector_;
  std::unique_ptr<std::atomic<uint64_t>[]> seen_;  // [rank]: last seen value of its counter
  std::vector<bool> reserved_ = {};  // [page of the staging buffers]: this rank has committed it
};

// The store of `progress` and the load of `sleepers` must not be reordered (seq_cst). A sleeper
// counts itself first and reads `progress` second, so this thread reads the sleeper's count, or the
// sleeper reads the new value.
inline void Group::advance(uint64_t progress) {
  RankState& mine = *own_state_;
  mine.progress.store(progress, std::memory_order_seq_cst);
  if (mine.sleepers.load(std::memory_order_seq_cst) != 0) [[unlikely]]
    wake_sleepers(mine.progress);
}

// Release and acquire on `seen_` make the data that a counter value covers visible to every thread
// of this rank that finds the value there.
inline bool Group::has_reached(Rank r, uint64_t wanted, const std::atomic<uint64_t>& polled) {
  if (reached(seen_[r].load(std::memory_order_acquire), wanted)) return true;
  const uint64_t progress = polled.load(std::memory_order_acquire);
  if (!reached(progress, wanted)) return false;
  seen_[r].store(progress, std::memory_order_release);
  return true;
}

}  // namespace pycollect::ipc
