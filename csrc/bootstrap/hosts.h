// Which ranks are on which host. Ranks of one host share memory.
#pragma once
#include <vector>

#include "../plan/plan.h"

namespace pycollect {

class Hosts {
 public:
  // `host_of`: [rank], any number for each host. Hosts are numbered by their lowest ranks.
  explicit Hosts(const std::vector<int>& host_of);

  int world() const { return static_cast<int>(host_of_.size()); }
  int count() const { return static_cast<int>(ranks_.size()); }
  int of(Rank r) const { return host_of_[r]; }
  const std::vector<Rank>& ranks(int host) const { return ranks_[host]; }  // in rank order
  int index(Rank r) const { return index_[r]; }  // position among the ranks of its host
  // Number of ranks that move data between hosts on every host, each on a rail of its own: the
  // least number of ranks on a host.
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
