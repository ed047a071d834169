#include "peer_info.h"

#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>

#include "../group/format_ranks.h"
#include "../group/system.h"
#include "../plan/error.h"

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
  const std::vector<std::string> alike = names;
  for (int h = 0; h < hosts.count(); ++h)
    if (std::ranges::count(alike, names[h]) > 1) names[h] += text(" (host ", h, ")");
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

}  // namespace pycollect::ipc
