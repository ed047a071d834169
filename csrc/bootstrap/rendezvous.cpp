#include "rendezvous.h"

#include <fcntl.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <system_error>

#include "../group/format_ranks.h"
#include "../plan/error.h"

namespace pycollect::ipc {
namespace {

// Time limit of a query for one rank's key after a failure, when the key may never arrive.
constexpr std::chrono::milliseconds kLastQuery{20};
// How long to wait for the store between liveness checks: half the second within which a death must
// be detected.
constexpr std::chrono::milliseconds kLivenessInterval{500};

std::string key(Rank rank) { return text("hello/", rank); }

}  // namespace

Rendezvous::Rendezvous(Store& store, Rank rank, int world, const GroupSettings& settings,
                       const FailureSources& failure_sources)
    : store_(store),
      rank_(rank),
      world_(world),
      settings_(settings),
      deadline_(deadline_after(settings.timeout)),
      failure_sources_(failure_sources) {}

std::vector<PeerInfo> Rendezvous::share(std::size_t bytes, const Preparation& preparation) {
  PeerInfo mine = describe_self(settings_, world_);
  network_space_ = mine.network_space;
  try {
    if (auto segment = obtain_segment(mine, bytes)) preparation(std::move(segment), mine.nonce);
  } catch (const PeerLost&) {
    throw;
  } catch (const Timeout&) {
    throw;
  } catch (const Interruption&) {
    throw;
  } catch (const std::exception& error) {  // published to all ranks below
    mine.failure = error.what();
  }
  try {
    store_.post(key(rank_), mine.encode());
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
std::shared_ptr<Segment> Rendezvous::obtain_segment(PeerInfo& mine, std::size_t bytes) {
  if (settings_.segment) return settings_.segment;
  if (world_ > kMaxRanks) return nullptr;  // a world of several hosts, or an error
  if (rank_ == 0) {
    auto segment = Segment::create(bytes);
    if (world_ == 1) return segment;
    UniqueFd file(fcntl(segment->descriptor(), F_DUPFD_CLOEXEC, 0));
    if (!file) refuse("cannot offer the shared memory", errno);
    mine.fd_server = fd_server_.emplace(std::move(file)).id();
    return segment;
  }
  std::string record;
  try {
    record = store_.read(key(0), deadline_);
  } catch (const Timeout&) {
    time_out({0});
  }
  const PeerInfo owner = PeerInfo::decode(record);
  if (owner.domain != mine.domain || owner.common_settings != mine.common_settings ||
      owner.host_settings != mine.host_settings || !owner.failure.empty())
    return nullptr;
  return Segment::adopt(fetch_from(owner), bytes);
}

UniqueFd Rendezvous::fetch_from(const PeerInfo& owner) const {
  try {
    return fetch(owner.fd_server, deadline_);
  } catch (const std::system_error& error) {
    const int why = error.code().value();
    if (why == EAGAIN || Clock::now() >= deadline_) time_out({0});
    if (why == ECONNREFUSED && network_space_ != 0 && owner.network_space == network_space_)
      fail(AbortRecord::lost, text("rank 0 (pid ", owner.pid,
                                   ") died before all ranks had joined, or has stopped waiting"));
    throw;
  }
}

std::vector<std::string> Rendezvous::read_all() {
  std::vector<std::string> keys;
  for (Rank r = 0; r < world_; ++r) keys.push_back(key(r));
  for (bool peer_failed = false;;) {
    try {
      return store_.read_all(
          keys, std::min(deadline_, Clock::now() + (peer_failed ? kLastQuery : kLivenessInterval)));
    } catch (const Timeout&) {  // some stores throw it a second late
      if (Clock::now() >= deadline_) break;
    }
    // A rank that died may have completed the rendezvous before: then the second read succeeds.
    if (peer_failed) throw_cause();
    peer_failed = has_failed_peer();
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

void Rendezvous::time_out(const std::vector<Rank>& missing) const {
  const std::chrono::duration<double> waited = settings_.timeout;
  fail(AbortRecord::timed_out, text("Timed out after ", waited.count(), " s; ",
                                    missing.empty() ? "the last rank joined too late"
                                                    : text(name(missing), " did not arrive")));
}

// Returns true if waiting is pointless: the group is aborted or a rank has died.
bool Rendezvous::has_failed_peer() const {
  return failure_sources_.abort_state &&
         (failure_sources_.abort_state->is_aborted() ||
          (failure_sources_.peers && failure_sources_.peers->dead() != 0));
}

void Rendezvous::throw_cause() const {
  if (failure_sources_.abort_state->is_aborted()) failure_sources_.abort_state->rethrow();
  const Rank r = std::countr_zero(failure_sources_.peers->dead());
  fail(AbortRecord::lost, text("rank ", r, " (pid ", failure_sources_.peers->pid(r),
                               ") died before all ranks had joined"));
}

// Throws with the cause published by the first rank that failed.
void Rendezvous::fail(uint32_t kind, const std::string& cause) const {
  if (failure_sources_.abort_state) {
    failure_sources_.abort_state->set({kind, cause}, nullptr);
    failure_sources_.abort_state->rethrow();
  }
  const std::string why = text("group '", settings_.name, "': ", cause);
  if (kind == AbortRecord::timed_out) throw Timeout(why);
  throw PeerLost(why);
}

}  // namespace pycollect::ipc
