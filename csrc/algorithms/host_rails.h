// Rails of plans that reduce over hosts: on every rail, one rank of each host moves a share of the
// data between the hosts, in pieces, a few of which are under way at a time.
#pragma once
#include <algorithm>
#include <utility>

#include "../plan/hosts.h"
#include "../plan/registry.h"

namespace pycollect {

class HostRails {
 public:
  explicit HostRails(const AlgorithmParams& params)
      : hosts_(hosts_or_one(params.hosts, params.world)), seen_(params.host) {}

  const Hosts& hosts() const { return hosts_; }
  int count() const { return hosts_.rails(); }
  Rank rank(int host, int rail) const { return hosts_.ranks(host)[rail]; }
  // Returns the rail on which data for rank `to` passes.
  int towards(Rank to) const { return hosts_.index(to) % hosts_.rails(); }

  // Returns whether the plan must have what the host does, see AlgorithmParams.
  bool sees(int host) const { return seen_ == kAllHosts || host == seen_; }

  // Returns the number of pieces of a part of a rail's share, which has a part for each host.
  int pieces_of_part(int pieces) const { return std::max(pieces / hosts_.count(), 1); }

  // Calls `round(hop, piece)` for every piece and hop. A rank that waits for a piece has begun
  // kAhead more for every hop between, so that the links are busy meanwhile.
  template <class Round>
  static void pipeline(int hops, int pieces, const Round& round) {
    constexpr int kAhead = 4;
    for (int time = 0; time < kAhead * (hops - 1) + pieces; ++time)
      for (int hop = 0; hop < hops; ++hop) {
        const int piece = time - kAhead * hop;
        if (piece >= 0 && piece < pieces) round(hop, piece);
      }
  }

  // The result of a reduction is in scratch of `from`: `me`, in its place on another host, fetches
  // it.
  static void pass_on(Plan& plan, Rank me, Rank from, int c) {
    plan.copy(tmp(me, c), tmp(from, c));
    plan.copy(out(me, c), tmp(me, c));
  }
  // The other ranks of the host fetch it from `me`.
  void hand_out(Plan& plan, Rank me, int c) const {
    for (const Rank r : hosts_.ranks(hosts_.of(me)))
      if (r != me) plan.copy(out(r, c), tmp(me, c));
  }

 private:
  const Hosts hosts_;
  const int seen_;
};

}  // namespace pycollect
