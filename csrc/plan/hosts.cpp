// See hosts.h.
#include "hosts.h"

#include <algorithm>
#include <list>
#include <map>
#include <mutex>

#include "error.h"

namespace pycollect {

Hosts::Hosts(const std::vector<int>& host_of) {
  require(!host_of.empty(), "a world has at least one rank");
  std::map<int, int> numbers;
  for (const int given : host_of) {
    const int host = numbers.emplace(given, count()).first->second;
    if (host == count()) ranks_.emplace_back();
    in_rank_order_ &= host_of_.empty() || host >= host_of_.back();
    index_.push_back(static_cast<int>(ranks_[host].size()));
    ranks_[host].push_back(static_cast<Rank>(host_of_.size()));
    host_of_.push_back(host);
  }
  rails_ = world();
  for (const auto& ranks : ranks_) rails_ = std::min(rails_, static_cast<int>(ranks.size()));
}

Hosts Hosts::of_sizes(const std::vector<int>& ranks_per_host) {
  std::vector<int> host_of;
  for (std::size_t h = 0; h < ranks_per_host.size(); ++h) {
    require(ranks_per_host[h] >= 1, "host ", h, " has ", ranks_per_host[h],
            " ranks; every host needs at least one");
    host_of.insert(host_of.end(), ranks_per_host[h], static_cast<int>(h));
  }
  return Hosts(host_of);
}

// A round-robin tournament: in round k, the ranks r and k - r (modulo an odd number) meet, and the
// rank that would meet itself meets the last one, if the number of ranks is even.
std::vector<Rank> Hosts::meeting_order(Rank me) const {
  const int odd = world() - 1 + world() % 2;
  std::vector<Rank> order;
  for (int round = 0; round < odd; ++round) {
    const Rank alone = round % 2 == 0 ? round / 2 : (round + odd) / 2;  // 2 alone = round
    const Rank peer = me == odd ? alone : me == alone ? odd : (round - me + odd) % odd;
    if (peer < world() && of(peer) != of(me)) order.push_back(peer);
  }
  return order;
}

const Hosts& interned(const Hosts& hosts) {
  static std::mutex& mutex = *new std::mutex;
  static std::list<Hosts>& all = *new std::list<Hosts>;
  const std::lock_guard lock(mutex);
  const auto known = std::find(all.begin(), all.end(), hosts);
  return known != all.end() ? *known : all.emplace_back(hosts);
}

Hosts hosts_or_one(const Hosts* hosts, int world) {
  return hosts != nullptr ? *hosts : Hosts(std::vector<int>(world));
}

}  // namespace pycollect
