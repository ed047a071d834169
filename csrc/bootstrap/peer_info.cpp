#include "peer_info.h"

#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <thread>

#include "../group/format_ranks.h"
#include "../group/system.h"
#include "../plan/error.h"

namespace pycollect::ipc {
namespace {

// First line of an encoded PeerInfo. Ranks with different versions are incompatible.
constexpr char kVersion[] = "pycollect-3";

std::string host_name() {
  std::array<char, 256> name = {};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown";
}

std::string boot_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id.empty() ? "of " + host_name() : id;
}

uint64_t space_of(const char* what) {
  struct stat found = {};
  return stat(text("/proc/self/ns/", what).c_str(), &found) == 0 ? found.st_ino : 0;
}

std::array<uint64_t, PeerInfo::kCoreWords> own_cores() {
  std::array<uint64_t, PeerInfo::kCoreWords> words = {};
  cpu_set_t set;
  static_assert(sizeof set == sizeof words);
  if (sched_getaffinity(0, sizeof set, &set) == 0) std::memcpy(words.data(), &set, sizeof set);
  return words;
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
  const std::string common_settings =
      text("ranks=", world, " buffer_bytes=", settings.buffer_bytes,
           " mailbox_bytes=", settings.mailbox_bytes,
           " symmetric_heap_bytes=", settings.symmetric_heap_bytes, settings.common_settings);
  return {.host = host_name(),
          .boot = boot_id(),
          .pid = getpid(),
          .user = geteuid(),
          .user_space = space_of("user"),
          .network_space = space_of("net"),
          .nonce = random_number(),
          .ticket = {},
          .cores = own_cores(),
          .common_settings = common_settings,
          .failure = {}};
}

std::string PeerInfo::encode() const {
  std::ostringstream out;
  out << kVersion << '\n' << host << '\n' << boot << '\n' << common_settings << '\n';
  out << pid << ' ' << user << ' ' << user_space << ' ' << network_space << ' ' << nonce << ' '
      << ticket.fd_server << ' ' << ticket.number;
  for (uint64_t word : cores) out << ' ' << word;
  out << '\n' << failure;
  return out.str();
}

PeerInfo PeerInfo::decode(const std::string& posted) {
  std::istringstream in(posted);
  PeerInfo it;
  std::string version;
  std::getline(in, version);
  for (std::string* line : {&it.host, &it.boot, &it.common_settings}) std::getline(in, *line);
  in >> it.pid >> it.user >> it.user_space >> it.network_space >> it.nonce;
  in >> it.ticket.fd_server >> it.ticket.number;
  for (uint64_t& word : it.cores) in >> word;
  in.get();
  require(in && version == kVersion, "the ranks of a group must run the same version of pycollect");
  it.failure.assign(std::istreambuf_iterator<char>(in), {});
  return it;
}

void require_one_host(const std::vector<PeerInfo>& ranks, const std::string& group) {
  std::vector<std::pair<const PeerInfo*, std::vector<Rank>>> hosts;
  for (Rank r = 0; r < static_cast<Rank>(ranks.size()); ++r) {
    const auto known = std::ranges::find_if(
        hosts, [&](const auto& host) { return host.first->boot == ranks[r].boot; });
    if (known != hosts.end())
      known->second.push_back(r);
    else
      hosts.push_back({&ranks[r], {r}});
  }
  if (hosts.size() == 1) return;
  std::string places;
  for (const auto& [host, there] : hosts) {
    const bool unique = std::ranges::count_if(hosts, [&, of = host](const auto& other) {
                          return other.first->host == of->host;
                        }) == 1;
    places +=
        text(places.empty() ? "" : ", ", name(there), there.size() == 1 ? " is on " : " are on ",
             host->host, unique ? "" : text(" (boot ", host->boot.substr(0, 8), ")"));
  }
  throw std::invalid_argument(text("all ranks of a pycollect group must be on one host; in group '",
                                   group, "' ", places,
                                   ": use gloo (CPU) or nccl (CUDA) between hosts, and a pycollect "
                                   "group within each"));
}

void require_same_settings(const std::vector<PeerInfo>& ranks, const std::string& group) {
  for (Rank r = 1; r < static_cast<Rank>(ranks.size()); ++r)
    require(ranks[r].common_settings == ranks[0].common_settings, "the ranks of group '", group,
            "' have different settings: rank 0 has ", ranks[0].common_settings, ", rank ", r,
            " has ", ranks[r].common_settings,
            "; options and PYCOLLECT_ variables must be the same on all");
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

int shared_cores(const std::vector<PeerInfo>& ranks) {
  int cores = 0;
  for (int i = 0; i < PeerInfo::kCoreWords; ++i) {
    uint64_t all = 0;
    for (const PeerInfo& it : ranks) all |= it.cores[i];
    cores += std::popcount(all);
  }
  return cores > 0 ? cores : static_cast<int>(std::thread::hardware_concurrency());
}

}  // namespace pycollect::ipc
