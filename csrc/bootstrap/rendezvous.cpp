#include "rendezvous.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <optional>
#include <system_error>

#include "../group/format_ranks.h"
#include "../plan/error.h"
#include "fd_server.h"

namespace pycollect::ipc {
namespace {

// Time limit of a query for one rank's key after a failure, when the key may never arrive.
constexpr std::chrono::milliseconds kLastQuery{20};
// How long to wait for the store between liveness checks: half the second within which a death must
// be detected.
constexpr std::chrono::milliseconds kLivenessInterval{500};

std::string key(Rank rank) { return text("hello/", rank); }

class Rendezvous {
 public:
  Rendezvous(Store& store, Rank rank, const SegmentLayout& layout, const GroupSettings& settings)
      : store_(store),
        rank_(rank),
        world_(layout.sizes.world),
        layout_(layout),
        settings_(settings),
        deadline_(deadline_after(settings.timeout)),
        mine_(describe_self(settings, world_)) {}

  Membership join() {
    try {
      made_.ranks = share();
      require_one_memory();
      made_.segment->touch(0, used_at_once());  // all ranks have joined, so rank 0 has committed it
      return std::move(made_);
    } catch (const std::exception& error) {
      // Peers may have seen this rank in the shared memory.
      const Rank me = settings_.world_ranks.empty() ? rank_ : settings_.world_ranks[rank_];
      const std::string why = text("rank ", me, " gave up: ", error.what());
      if (made_.abort_state) made_.abort_state->set({AbortRecord::lost, why}, nullptr);
      throw;
    }
  }

 private:
  // What every group uses. Staging buffers and the rings of the mailboxes are committed when they
  // are first used, by the rank that writes them: their pages then lie on the NUMA node where that
  // rank runs.
  std::size_t used_at_once() const { return layout_.mailboxes + settings_.mailbox_header_bytes; }

  std::vector<PeerInfo> share() {
    try {
      publish();
    } catch (const Timeout&) {  // others can use the store only after rank 0 has opened it
      time_out({0});
    }
    std::vector<PeerInfo> ranks;
    for (const std::string& record : read_all()) ranks.push_back(PeerInfo::decode(record));
    require_same_settings(ranks, settings_.name);
    if (hosts_of(ranks).count() > 1) {
      if (settings_.one_host) require_one_host(ranks, settings_.name);
      throw SeveralHosts{std::move(ranks)};
    }
    require(world_ <= kMaxRanks, "a pycollect group has at most ", kMaxRanks,
            " ranks on one host, not ", world_);
    require_shared(ranks, settings_.name);
    return ranks;
  }

  void publish() {
    try {
      obtain_segment();
      if (made_.segment) enter();
    } catch (const PeerLost&) {
      throw;
    } catch (const Timeout&) {
      throw;
    } catch (const Interruption&) {
      throw;
    } catch (const std::exception& error) {
      mine_.failure = error.what();
    }
    store_.post(key(rank_), mine_.encode());
  }

  // Creates the segment on rank 0, and fetches it on others, unless rank 0's PeerInfo shows why it
  // cannot be fetched: another host, other settings, or a failure.
  void obtain_segment() {
    made_.segment = settings_.segment;
    // More ranks than that are a world of several hosts, or an error.
    if (made_.segment || world_ > kMaxRanks) return;
    if (rank_ == 0) {
      made_.segment = Segment::create(layout_.total);
      if (world_ > 1) mine_.fd_server = fd_server_.emplace(made_.segment->descriptor()).id();
      return;
    }
    const PeerInfo owner = PeerInfo::decode(store_.read(key(0), deadline_));
    if (owner.domain == mine_.domain && owner.common_settings == mine_.common_settings &&
        owner.host_settings == mine_.host_settings && owner.failure.empty())
      made_.segment = std::make_shared<Segment>(fetch_from(owner), layout_.total);
  }

  UniqueFd fetch_from(const PeerInfo& owner) const {
    try {
      return fetch(owner.fd_server, deadline_);
    } catch (const std::system_error& error) {
      const int why = error.code().value();
      if (why == EAGAIN || Clock::now() >= deadline_) throw Timeout("rank 0 does not answer");
      if (why == ECONNREFUSED && mine_.network_space != 0 &&
          owner.network_space == mine_.network_space)
        fail(AbortRecord::lost, text("rank 0 (pid ", owner.pid,
                                     ") died before all ranks had joined, or has stopped waiting"));
      throw;
    }
  }

  // Sets this rank up in the shared memory.
  void enter() {
    made_.segment->commit(0, SegmentLayout::up(sizeof(Control)));
    Control& control = *reinterpret_cast<Control*>(made_.segment->data());
    made_.abort_state = std::make_unique<AbortState>(control.record, settings_.name);
    control.nonces[rank_].store(mine_.nonce);
    made_.failure_detector = std::make_unique<FailureDetector>(control, world_, rank_);
    // After the liveness lock is held: the kernel may kill the process here for lack of memory.
    if (rank_ == 0) made_.segment->commit(0, used_at_once());
  }

  void require_one_memory() const {
    const Control& control = *reinterpret_cast<const Control*>(made_.segment->data());
    for (Rank r = 0; r < world_; ++r)
      if (control.nonces[r].load() != made_.ranks[r].nonce)
        throw CollectiveError(
            text("the ranks of group '", settings_.name,
                 "' mapped different shared memory; all ranks must be on one host"));
  }

  std::vector<std::string> read_all() {
    std::vector<std::string> keys;
    for (Rank r = 0; r < world_; ++r) keys.push_back(key(r));
    // A rank that died may have completed the rendezvous before: then the last read succeeds.
    for (bool last = false;; last = has_failed_peer()) {
      const auto time = last ? kLastQuery : kLivenessInterval;
      try {
        return store_.read_all(keys, std::min(deadline_, Clock::now() + time));
      } catch (const Timeout&) {  // some stores throw it a second late
        if (Clock::now() >= deadline_) break;
      }
      if (last) throw_cause();
    }
    std::vector<Rank> missing;
    for (Rank r = 0; r < world_; ++r) {
      try {
        store_.read(keys[r], Clock::now() + kLastQuery);
      } catch (const Timeout&) {
        missing.push_back(r);
      }
    }
    time_out(missing);
  }

  // Returns true if waiting is pointless: the group is aborted or a rank has died.
  bool has_failed_peer() const {
    return made_.abort_state && (made_.abort_state->is_aborted() ||
                                 (made_.failure_detector && made_.failure_detector->dead() != 0));
  }

  [[noreturn]] void throw_cause() const {
    if (made_.abort_state->is_aborted()) made_.abort_state->rethrow();
    const Rank r = std::countr_zero(made_.failure_detector->dead());
    fail(AbortRecord::lost, text("rank ", r, " (pid ", made_.failure_detector->pid(r),
                                 ") died before all ranks had joined"));
  }

  [[noreturn]] void time_out(const std::vector<Rank>& missing) const {
    const std::chrono::duration<double> waited = settings_.timeout;
    fail(AbortRecord::timed_out, text("Timed out after ", waited.count(), " s; ",
                                      missing.empty() ? "the last rank joined too late"
                                                      : text(name(missing), " did not arrive")));
  }

  // Throws with the cause published by the first rank that failed.
  [[noreturn]] void fail(uint32_t kind, const std::string& cause) const {
    if (made_.abort_state) {
      made_.abort_state->set({kind, cause}, nullptr);
      made_.abort_state->rethrow();
    }
    throw_failure(kind, text("group '", settings_.name, "': ", cause));
  }

  Store& store_;
  const Rank rank_;
  const int world_;
  const SegmentLayout& layout_;
  const GroupSettings& settings_;
  const Deadline deadline_;
  PeerInfo mine_;
  Membership made_;
  std::optional<FdServer> fd_server_;  // only on rank 0
};

}  // namespace

Membership rendezvous(Store& store, Rank rank, const SegmentLayout& layout,
                      const GroupSettings& settings) {
  return Rendezvous(store, rank, layout, settings).join();
}

}  // namespace pycollect::ipc
