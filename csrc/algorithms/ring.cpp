// Rings that keep the rank order; neighbours only. All-reduce adds along the chain 0 -> W-1 and
// passes the result on around the ring, P pieces one hop apart: 2 (W-1) + P - 1 rounds of S/P, 2 S
// per link; sums are rounded at every hop. All-gather hands every block on W-1 times: W-1 rounds,
// (W-1)/W S per link.
#include "../plan/registry.h"

namespace pycollect {
namespace {

Plan all_reduce(const Ask& ask) {
  const int n = ask.world, hops = 2 * (n - 1);
  Plan p{n, ask.pieces};
  for (int time = 0; time < hops + ask.pieces - 1; ++time)
    for (int hop = 0; hop < hops; ++hop) {
      const int c = time - hop, me = (hop + 1) % n, left = hop % n;
      if (c < 0 || c >= ask.pieces) continue;
      if (hop < n - 1)
        p.fold({out(me, c)}, {hop == 0 ? in(left, c) : out(left, c), in(me, c)});
      else
        p.copy(out(me, c), out(left, c));
    }
  return p;
}

// A rank's own block goes to its own output and to the right neighbour in one step.
Plan all_gather(const Ask& ask) {
  const int n = ask.world;
  Plan p{n, n};
  for (int round = 1; round < n; ++round)
    for (int c = 0; c < n; ++c) {
      const Rank me = (c + round) % n, left = (me + n - 1) % n;
      if (round == 1)
        p.fold({out(c, c), out(me, c)}, {in(c, c)});
      else
        p.copy(out(me, c), out(left, c));
    }
  return p;
}

const Register kAllReduce{{.name = "ring",
                           .collective = Collective::all_reduce,
                           .make = all_reduce,
                           .cost = "2 (W-1) + P - 1 rounds of S/P; 2 S per link",
                           .order = Order::native}};
const Register kAllGather{{.name = "ring",
                           .collective = Collective::all_gather,
                           .make = all_gather,
                           .cost = "W-1 rounds of S/W; (W-1)/W S per link"}};

}  // namespace
}  // namespace pycollect
