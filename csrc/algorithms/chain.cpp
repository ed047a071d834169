// The ordered chain, from neighbour to neighbour, P pieces one hop apart. Reduce adds along
// 0 -> W-1, in rank order but rounded at every hop, and keeps partial sums in scratch, so that only
// the root's data changes; broadcast starts at the root and goes around: W - 2 + P rounds of S/P,
// S per link. All-reduce is both, one behind the other: 2 (W-1) + P - 1 rounds of S/P, 2 S per
// link.
#include "../plan/registry.h"

namespace pycollect {
namespace {

// Partial sums lie in the outputs of the ranks that they pass.
Plan all_reduce(const AlgorithmParams& params) {
  const int n = params.world, hops = 2 * (n - 1);
  Plan p{n, params.pieces};
  for (int time = 0; time < hops + params.pieces - 1; ++time)
    for (int hop = 0; hop < hops; ++hop) {
      const int c = time - hop, me = (hop + 1) % n, left = hop % n;
      if (c < 0 || c >= params.pieces) continue;
      if (hop < n - 1)
        p.fold({out(me, c)}, {hop == 0 ? in(left, c) : out(left, c), in(me, c)});
      else
        p.copy(out(me, c), out(left, c));
    }
  return p;
}

// The root writes its own output and its neighbour's in one step.
Plan broadcast(const AlgorithmParams& params) {
  const int n = params.world;
  Plan p{n, params.pieces};
  for (int time = 1; time < n - 1 + params.pieces; ++time)
    for (int hop = 1; hop < n; ++hop) {
      const int c = time - hop;
      const Rank me = (params.root + hop) % n, left = (params.root + hop - 1) % n;
      if (c < 0 || c >= params.pieces) continue;
      if (hop == 1)
        p.fold({out(left, c), out(me, c)}, {in(left, c)});
      else
        p.copy(out(me, c), out(left, c));
    }
  return p;
}

// The last rank of the chain adds its own and writes the sum to the root.
Plan reduce(const AlgorithmParams& params) {
  const int n = params.world;
  Plan p{n, params.pieces};
  for (int time = 1; time < n - 1 + params.pieces; ++time)
    for (Rank me = 1; me < n; ++me) {
      const int c = time - me;
      if (c < 0 || c >= params.pieces) continue;
      const Slice sum = me == n - 1 ? out(params.root, c) : tmp(me, c);
      p.fold({sum}, {me == 1 ? in(0, c) : tmp(me - 1, c), in(me, c)}, me);
    }
  return p;
}

const RegisterAlgorithm kAllReduce{{.name = "chain",
                                    .collective = Collective::all_reduce,
                                    .make = all_reduce,
                                    .cost = "2 (W-1) + P - 1 rounds of S/P; 2 S per link",
                                    .order = Order::native}};
const RegisterAlgorithm kBroadcast{{.name = "chain",
                                    .collective = Collective::broadcast,
                                    .make = broadcast,
                                    .cost = "W - 2 + P rounds of S/P; S per link"}};
const RegisterAlgorithm kReduce{{.name = "chain",
                                 .collective = Collective::reduce,
                                 .make = reduce,
                                 .cost = "W - 2 + P rounds of S/P; S per link",
                                 .order = Order::native}};

}  // namespace
}  // namespace pycollect
