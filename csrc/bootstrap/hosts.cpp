// See hosts.h.
#include "hosts.h"

#include <algorithm>
#include <map>

#include "../plan/error.h"

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

}  // namespace pycollect
