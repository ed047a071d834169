// Where ranks run: on which hosts, and on which cores and NUMA nodes of a host; and how messages
// name them. Memory of a segment lies on the node of the thread that commits it, so each rank
// commits its own part, and no page is ever moved. Ranks are not bound to nodes here: launchers do
// that, and a rank's threads inherit it.
#pragma once
#include <bitset>
#include <map>
#include <string>
#include <vector>

#include "../plan/error.h"
#include "../plan/plan.h"

namespace pycollect {

// Which ranks are on which host. Ranks of one host share memory.
class Hosts {
 public:
  // `host_of`: [rank], any number for each host. Hosts are numbered by their lowest ranks.
  explicit Hosts(const std::vector<int>& host_of);

  int world() const { return static_cast<int>(host_of_.size()); }
  int count() const { return static_cast<int>(ranks_.size()); }
  int of(Rank r) const { return host_of_[r]; }
  const std::vector<Rank>& ranks(int host) const { return ranks_[host]; }  // in rank order
  int index(Rank r) const { return index_[r]; }  // position among the ranks of its host
  // Number of rails: the least number of ranks on a host. The ranks with the same index on their
  // hosts are a rail, and move data between hosts.
  int rails() const { return rails_; }
  // Returns whether every host's ranks are consecutive, as torchrun numbers them.
  bool in_rank_order() const { return in_rank_order_; }
  // Returns the ranks on other hosts in an order in which all ranks can meet them one after the
  // other: two ranks meet in the same round.
  std::vector<Rank> meeting_order(Rank me) const;

 private:
  std::vector<int> host_of_, index_;
  std::vector<std::vector<Rank>> ranks_;
  int rails_ = 0;
  bool in_rank_order_ = true;
};

}  // namespace pycollect

namespace pycollect::ipc {

using CoreSet = std::bitset<1024>;  // as many cores as the C library's cpu_set_t

inline constexpr char kNodeFolder[] = "/sys/devices/system/node";

// Returns the cores of each node that has any, by the node's number; without such a folder,
// nothing.
using NumaNodes = std::map<int, CoreSet>;
NumaNodes numa_nodes(const std::string& folder = kNodeFolder);

// Returns how many cores the rank has for its folds: on each node where it may run, the node's
// cores divided among the ranks that may run there. At least 1; 0 if the nodes or the rank's cores
// (`cores[rank]`) are unknown. A rank that may run on some of a node's cores counts as one that may
// use all of them: often only its main thread is bound, to a single core, and OpenMP's are not.
int core_share(const NumaNodes& nodes, const std::vector<CoreSet>& cores, Rank rank);

// Returns "rank 3", "ranks 0, 2" or "ranks 0-3, 5".
inline std::string name(const std::vector<Rank>& ranks) {
  std::string all = ranks.size() == 1 ? "rank" : "ranks";
  for (std::size_t i = 0, end = 0; i < ranks.size(); i = end) {
    end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (end - i < 3) end = i + 1;  // two ranks are not a range
    all += text(i == 0 ? " " : ", ", ranks[i]);
    if (end - i > 1) all += text("-", ranks[end - 1]);
  }
  return all;
}

}  // namespace pycollect::ipc
