// The classic ring; neighbours only. All-reduce adds chunk c up along the ring from rank c on, then
// passes it on once more: 2 (W-1) rounds of S/W; 2 (W-1)/W S per link, the least that links can do.
// Every chunk is added in another order, so results differ from the left fold. All-gather passes
// every block on W-1 times: W-1 rounds, (W-1)/W S per link.
#include "../plan/registry.h"

namespace pycollect {
namespace {

Plan all_reduce(const AlgorithmParams& params) {
  const int n = params.world;
  Plan p{n, n};
  for (int round = 1; round < 2 * n - 1; ++round)
    for (int c = 0; c < n; ++c) {
      const Rank me = (c + round) % n, left = (me + n - 1) % n;
      if (round < n)
        p.fold({out(me, c)}, {round == 1 ? in(left, c) : out(left, c), in(me, c)});
      else
        p.copy(out(me, c), out(left, c));
    }
  return p;
}

// A rank's own block goes to its own output and to the right neighbour in one step.
Plan all_gather(const AlgorithmParams& params) {
  const int n = params.world;
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

const RegisterAlgorithm kAllReduce{{.name = "ring",
                                    .collective = Collective::all_reduce,
                                    .make = all_reduce,
                                    .cost = "2 (W-1) rounds of S/W; 2 (W-1)/W S per link",
                                    .order = Order::other}};
const RegisterAlgorithm kAllGather{{.name = "ring",
                                    .collective = Collective::all_gather,
                                    .make = all_gather,
                                    .cost = "W-1 rounds of S/W; (W-1)/W S per link"}};

}  // namespace
}  // namespace pycollect
