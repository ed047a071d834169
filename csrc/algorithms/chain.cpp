// From neighbour to neighbour, P pieces one hop apart: W - 2 + P rounds of S/P, S per link.
// Broadcast starts at the root and goes around; reduce adds along 0 -> W-1, so in rank order but
// rounded at every hop, and keeps partial sums in scratch, so that only the root's data changes.
#include "../plan/registry.h"

namespace pycollect {
namespace {

// The root writes its own output and its neighbour's in one step.
Plan broadcast(const Ask& ask) {
  const int n = ask.world;
  Plan p{n, ask.pieces};
  for (int time = 1; time < n - 1 + ask.pieces; ++time)
    for (int hop = 1; hop < n; ++hop) {
      const int c = time - hop;
      const Rank me = (ask.root + hop) % n, left = (ask.root + hop - 1) % n;
      if (c < 0 || c >= ask.pieces) continue;
      if (hop == 1)
        p.fold({out(left, c), out(me, c)}, {in(left, c)});
      else
        p.copy(out(me, c), out(left, c));
    }
  return p;
}

// The last rank of the chain adds its own and writes the sum to the root.
Plan reduce(const Ask& ask) {
  const int n = ask.world;
  Plan p{n, ask.pieces};
  for (int time = 1; time < n - 1 + ask.pieces; ++time)
    for (Rank me = 1; me < n; ++me) {
      const int c = time - me;
      if (c < 0 || c >= ask.pieces) continue;
      const Slice sum = me == n - 1 ? out(ask.root, c) : tmp(me, c);
      p.fold({sum}, {me == 1 ? in(0, c) : tmp(me - 1, c), in(me, c)}, me);
    }
  return p;
}

const Register kBroadcast{{.name = "chain",
                           .collective = Collective::broadcast,
                           .make = broadcast,
                           .cost = "W - 2 + P rounds of S/P; S per link"}};
const Register kReduce{{.name = "chain",
                        .collective = Collective::reduce,
                        .make = reduce,
                        .cost = "W - 2 + P rounds of S/P; S per link",
                        .order = Order::native}};

}  // namespace
}  // namespace pycollect
