// See placement.h.
#include "placement.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
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

namespace pycollect::ipc {

NumaNodes numa_nodes(const std::string& folder) {
  namespace fs = std::filesystem;
  NumaNodes nodes;
  std::error_code missing;
  for (const auto& entry : fs::directory_iterator(folder, missing)) {
    int number = 0;
    if (std::sscanf(entry.path().filename().c_str(), "node%d", &number) != 1) continue;
    CoreSet cores;
    std::ifstream ranges(entry.path() / "cpulist");  // such as "0-15,32-47"
    for (int first = 0; ranges >> first; ranges.ignore(1, ',')) {
      int last = first;
      if (ranges.peek() == '-') ranges.ignore(), ranges >> last;
      for (int core = std::max(first, 0); core <= std::min<int>(last, cores.size() - 1); ++core)
        cores.set(core);
    }
    if (cores.any()) nodes[number] = cores;  // others have memory only
  }
  return nodes;
}

int core_share(const NumaNodes& nodes, const std::vector<CoreSet>& cores, Rank rank) {
  double share = 0;
  for (const auto& [number, node] : nodes) {
    if ((node & cores[rank]).none()) continue;
    const auto here = std::ranges::count_if(
        cores, [&node = node](const CoreSet& of) { return (node & of).any(); });
    share += static_cast<double>(node.count()) / static_cast<double>(here);
  }
  // Sums of thirds and the like may end just below a whole number.
  return share > 0 ? std::max(1, static_cast<int>(share + 1e-6)) : 0;
}

}  // namespace pycollect::ipc
