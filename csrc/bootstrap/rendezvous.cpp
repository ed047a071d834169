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

  Membership join();
  // Peers may have seen this rank in the shared memory.
  void give_up(const std::string& why) {
    const Rank me = settings_.world_ranks.empty() ? rank_ : settings_.world_ranks[rank_];
    if (made_.abort_state)
      made_.abort_state->set({AbortRecord::lost, text("rank ", me, " gave up: ", why)}, nullptr);
  }

 private:
  // What every group uses. Staging buffers and the rings of the mailboxes are committed when they
  // are first used, by the rank that writes them: their pages then lie on the NUMA node where that
  // rank runs.
  std::size_t used_at_once() const { return layout_.mailboxes + settings_.mailbox_header_bytes; }
  std::vector<PeerInfo> share();
  std::shared_ptr<Segment> obtain_segment();
  UniqueFd fetch_from(const PeerInfo& owner) const;
  void enter(std::shared_ptr<Segment> segment);
  void require_one_memory(const std::vector<PeerInfo>& ranks) const;
  std::vector<std::string> read_all();
  bool has_failed_peer() const;
  [[noreturn]] void throw_cause() const;
  [[noreturn]] void time_out(const std::vector<Rank>& missing) const;
  [[noreturn]] void fail(uint32_t kind, const std::string& cause) const;

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

Membership Rendezvous::join() {
  const std::vector<PeerInfo> ranks = share();
  require_one_memory(ranks);
  made_.cores = shared_cores(ranks);
  made_.fold_threads = fold_threads(ranks, rank_);
  made_.segment->touch(0, used_at_once());  // all ranks have joined, so rank 0 has committed it
  return std::move(made_);
}

std::vector<PeerInfo> Rendezvous::share() {
  try {
    if (auto segment = obtain_segment()) enter(std::move(segment));
  } catch (const PeerLost&) {
    throw;
  } catch (const Timeout&) {
    throw;
  } catch (const Interruption&) {
    throw;
  } catch (const std::exception& error) {  // published to all ranks below
    mine_.failure = error.what();
  }
  try {
    store_.post(key(rank_), mine_.encode());
  } catch (const Timeout&) {  // the store accepts other ranks' keys only after rank 0 has opened it
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

// Creates the segment on rank 0, and fetches it on others. Returns nullptr if rank 0's PeerInfo
// shows why it cannot be fetched: another host, other settings, or a failure.
std::shared_ptr<Segment> Rendezvous::obtain_segment() {
  if (settings_.segment) return settings_.segment;
  if (world_ > kMaxRanks) return nullptr;  // a world of several hosts, or an error
  if (rank_ == 0) {
    made_.segment = Segment::create(layout_.total);
    if (world_ > 1) mine_.fd_server = fd_server_.emplace(made_.segment->descriptor()).id();
    return made_.segment;
  }
  std::string record;
  try {
    record = store_.read(key(0), deadline_);
  } catch (const Timeout&) {
    time_out({0});
  }
  const PeerInfo owner = PeerInfo::decode(record);
  if (owner.domain != mine_.domain || owner.common_settings != mine_.common_settings ||
      owner.host_settings != mine_.host_settings || !owner.failure.empty())
    return nullptr;
  return Segment::adopt(fetch_from(owner), layout_.total);
}

UniqueFd Rendezvous::fetch_from(const PeerInfo& owner) const {
  try {
    return fetch(owner.fd_server, deadline_);
  } catch (const std::system_error& error) {
    const int why = error.code().value();
    if (why == EAGAIN || Clock::now() >= deadline_) time_out({0});
    if (why == ECONNREFUSED && mine_.network_space != 0 &&
        owner.network_space == mine_.network_space)
      fail(AbortRecord::lost, text("rank 0 (pid ", owner.pid,
                                   ") died before all ranks had joined, or has stopped waiting"));
    throw;
  }
}

// Sets this rank up in the shared memory.
void Rendezvous::enter(std::shared_ptr<Segment> segment) {
  made_.segment = std::move(segment);
  made_.segment->commit(0, SegmentLayout::up(sizeof(Control)));
  Control& control = *reinterpret_cast<Control*>(made_.segment->data());
  made_.abort_state = std::make_unique<AbortState>(control.record, settings_.name);
  control.nonces[rank_].store(mine_.nonce);
  made_.failure_detector = std::make_unique<FailureDetector>(control, world_, rank_);
  // After the liveness lock is held: the kernel may kill the process here for lack of memory.
  if (rank_ == 0) made_.segment->commit(0, used_at_once());
}

void Rendezvous::require_one_memory(const std::vector<PeerInfo>& ranks) const {
  const Control& control = *reinterpret_cast<const Control*>(made_.segment->data());
  for (Rank r = 0; r < world_; ++r)
    if (control.nonces[r].load() != ranks[r].nonce)
      throw CollectiveError(
          text("the ranks of group '", settings_.name,
               "' mapped different shared memory; all ranks must be on one host"));
}

std::vector<std::string> Rendezvous::read_all() {
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
bool Rendezvous::has_failed_peer() const {
  return made_.abort_state && (made_.abort_state->is_aborted() ||
                               (made_.failure_detector && made_.failure_detector->dead() != 0));
}

void Rendezvous::throw_cause() const {
  if (made_.abort_state->is_aborted()) made_.abort_state->rethrow();
  const Rank r = std::countr_zero(made_.failure_detector->dead());
  fail(AbortRecord::lost, text("rank ", r, " (pid ", made_.failure_detector->pid(r),
                               ") died before all ranks had joined"));
}

void Rendezvous::time_out(const std::vector<Rank>& missing) const {
  const std::chrono::duration<double> waited = settings_.timeout;
  fail(AbortRecord::timed_out, text("Timed out after ", waited.count(), " s; ",
                                    missing.empty() ? "the last rank joined too late"
                                                    : text(name(missing), " did not arrive")));
}

// Throws with the cause published by the first rank that failed.
void Rendezvous::fail(uint32_t kind, const std::string& cause) const {
  if (made_.abort_state) {
    made_.abort_state->set({kind, cause}, nullptr);
    made_.abort_state->rethrow();
  }
  throw_failure(kind, text("group '", settings_.name, "': ", cause));
}

}  // namespace

Membership rendezvous(Store& store, Rank rank, const SegmentLayout& layout,
                      const GroupSettings& settings) {
  Rendezvous made(store, rank, layout, settings);
  try {
    return made.join();
  } catch (const std::exception& error) {
    made.give_up(error.what());
    throw;
  }
}

}  // namespace pycollect::ipc
