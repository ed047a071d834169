#include "rendezvous.h"

#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <sstream>
#include <system_error>

#include "../plan/error.h"
#include "fd_server.h"
#include "group.h"
#include "placement.h"
#include "system.h"

namespace pycollect::ipc {
namespace {

// First line of an encoded PeerInfo. Ranks with different versions are incompatible.
constexpr char kVersion[] = "pycollect-7";

std::string host_name() {
  std::array<char, 256> name = {};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown";
}

uint64_t space_of(const char* what) {
  struct stat found = {};
  return stat(text("/proc/self/ns/", what).c_str(), &found) == 0 ? found.st_ino : 0;
}

// Returns a description of differences between ranks (user, namespaces) that can prevent sharing
// memory, for error messages.
std::string differences(const std::vector<PeerInfo>& ranks) {
  std::vector<Rank> here, elsewhere;
  std::string users;
  for (Rank r = 0; r < static_cast<Rank>(ranks.size()); ++r) {
    const PeerInfo& it = ranks[r];
    (it.network_space == ranks[0].network_space ? here : elsewhere).push_back(r);
    if (!users.empty()) continue;
    if (it.user_space != ranks[0].user_space)
      users = text("; rank 0 is in another user namespace than rank ", r,
                   ", and both must be the same user of the host");
    else if (it.user != ranks[0].user)
      users = text("; rank 0 is run by user ", ranks[0].user, ", rank ", r, " by user ", it.user,
                   ", and all ranks need the same user");
  }
  if (elsewhere.empty()) return users;
  return text(users, "; ", name(here), here.size() == 1 ? " is" : " are",
              " in another network namespace than ", name(elsewhere),
              ", and all ranks need the same: give their containers one network (docker run ",
              "--network=host or --network=container:NAME), or put them in one container");
}

}  // namespace

PeerInfo describe_self(const GroupSettings& settings, int world) {
  const char* const variable = std::getenv("PYCOLLECT_HOST");
  const std::string given = variable == nullptr ? "" : variable;
  require(given.find('\n') == given.npos, "PYCOLLECT_HOST has more than one line");
  PeerInfo mine;
  mine.host = given.empty() ? host_name() : given;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> mine.boot;
  if (mine.boot.empty()) mine.boot = "of " + host_name();
  mine.pid = getpid();
  mine.user = geteuid();
  mine.user_space = space_of("user");
  mine.network_space = space_of("net");
  mine.nonce = random_number();
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0)
    for (std::size_t core = 0; core < mine.cores.size(); ++core)
      mine.cores[core] = CPU_ISSET(core, &set);
  mine.common_settings =
      text("ranks=", world, " buffer_bytes=", settings.buffer_bytes, settings.common_settings);
  mine.host_settings = text("mailbox_bytes=", settings.mailbox_bytes,
                            " symmetric_heap_bytes=", settings.symmetric_heap_bytes);
  mine.domain = !given.empty() ? text("PYCOLLECT_HOST=", given)
                               : text(mine.boot, " network ", mine.network_space);
  return mine;
}

std::string PeerInfo::encode() const {
  return text(kVersion, '\n', host, '\n', boot, '\n', domain, '\n', common_settings, '\n',
              host_settings, '\n', pid, ' ', user, ' ', user_space, ' ', network_space, ' ', nonce,
              ' ', fd_server, ' ', cores, '\n', failure);
}

PeerInfo PeerInfo::decode(const std::string& posted) {
  std::istringstream in(posted);
  PeerInfo it;
  std::string version;
  std::getline(in, version);
  for (std::string* line : {&it.host, &it.boot, &it.domain, &it.common_settings, &it.host_settings})
    std::getline(in, *line);
  in >> it.pid >> it.user >> it.user_space >> it.network_space >> it.nonce >> it.fd_server >>
      it.cores;
  in.get();
  require(in && version == kVersion, "the ranks of a group must run the same version of pycollect");
  it.failure.assign(std::istreambuf_iterator<char>(in), {});
  return it;
}

Hosts hosts_of(const std::vector<PeerInfo>& ranks) {
  std::map<std::string, int> numbers;
  std::vector<int> host_of;
  for (const PeerInfo& it : ranks)
    host_of.push_back(numbers.emplace(it.domain, static_cast<int>(numbers.size())).first->second);
  return Hosts(host_of);
}

std::vector<std::string> names_of(const Hosts& hosts, const std::vector<PeerInfo>& ranks) {
  std::vector<std::string> names;
  for (int h = 0; h < hosts.count(); ++h) names.push_back(ranks[hosts.ranks(h)[0]].host);
  const std::vector<std::string> given = names;
  for (int h = 0; h < hosts.count(); ++h)
    if (std::ranges::count(given, names[h]) > 1) names[h] += text(" (host ", h, ")");
  return names;
}

void require_one_host(const std::vector<PeerInfo>& ranks, const std::string& group) {
  const Hosts hosts = hosts_of(ranks);
  if (hosts.count() == 1) return;
  const std::vector<std::string> names = names_of(hosts, ranks);
  std::string places;
  for (int h = 0; h < hosts.count(); ++h)
    places += text(places.empty() ? "" : ", ", name(hosts.ranks(h)),
                   hosts.ranks(h).size() == 1 ? " is on " : " are on ", names[h]);
  throw std::invalid_argument(
      text("all ranks of group '", group, "' must be on one host, because its options have ",
           "hosts='one', but ", places, differences(ranks),
           ": pass hosts='exact', or use a pycollect group within each host"));
}

void require_same_settings(const std::vector<PeerInfo>& ranks, const std::string& group) {
  const auto check = [&](Rank r, Rank other, const std::string PeerInfo::* settings) {
    require(ranks[r].*settings == ranks[other].*settings, "the ranks of group '", group,
            "' have different settings: rank ", other, " has ", ranks[other].*settings, ", rank ",
            r, " has ", ranks[r].*settings,
            "; options and PYCOLLECT_ variables must be the same on all");
  };
  const Hosts hosts = hosts_of(ranks);
  for (Rank r = 1; r < static_cast<Rank>(ranks.size()); ++r) {
    check(r, 0, &PeerInfo::common_settings);
    check(r, hosts.ranks(hosts.of(r))[0], &PeerInfo::host_settings);
  }
}

void require_shared(const std::vector<PeerInfo>& ranks, const std::string& group) {
  std::map<std::string, std::vector<Rank>> failures;
  for (Rank r = 0; r < static_cast<Rank>(ranks.size()); ++r)
    if (!ranks[r].failure.empty()) failures[ranks[r].failure].push_back(r);
  if (failures.empty()) return;
  std::string reasons;
  for (const auto& [reason, failed] : failures) reasons += text("; ", name(failed), ": ", reason);
  throw CollectiveError(
      text("the ranks of group '", group, "' cannot share memory", reasons, differences(ranks)));
}

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
      std::string why = store_.failure(error);
      if (why.empty()) why = text("rank ", me, " gave up: ", error.what());
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
