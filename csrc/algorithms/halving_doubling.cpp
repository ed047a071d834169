// Recursive halving and doubling: partners exchange and add half of their data, in each round at
// half the distance, down to one chunk each; then they return the results in the reverse order.
// 2 log2(m) rounds and 2 (m-1)/m S per rank for the m ranks of the largest power of two. The other
// ranks send S to a partner before and receive S from it after, in 2 more rounds. The additions are
// not in rank order, so results differ from the left fold.
#include <algorithm>

#include "../plan/registry.h"

namespace pycollect {
namespace {

Plan halving_doubling(const AlgorithmParams& params) {
  int m = 1;
  while (2 * m <= params.world) m *= 2;
  const int extra = params.world - m;
  Plan p{params.world, m};
  for (Rank r = 0; r < extra; ++r) p.fold({tmp(r, 0, m)}, {in(r, 0, m), in(m + r, 0, m)});
  for (int half = m / 2; half >= 1; half /= 2)
    for (Rank me = 0; me < m; ++me) {
      const int first = me / half * half, peer = me ^ half;  // my half of the block we share
      auto has = [&](Rank r) {
        return half == m / 2 && r >= extra ? in(r, first, half) : tmp(r, first, half);
      };
      p.fold({half == 1 ? out(me, me) : tmp(me, first, half)},
             {has(std::min(me, peer)), has(std::max(me, peer))});
    }
  for (int half = 1; half < m; half *= 2)
    for (Rank me = 0; me < m; ++me) {
      const int peer = me ^ half, first = peer / half * half;
      p.copy(out(me, first, half), out(peer, first, half));
    }
  for (Rank r = 0; r < extra; ++r) p.copy(out(m + r, 0, m), out(r, 0, m));
  return p;
}

const RegisterAlgorithm kRegister{
    {.name = "halving_doubling",
     .collective = Collective::all_reduce,
     .make = halving_doubling,
     .cost = "2 log2 m rounds and 2 (m-1)/m S per rank, m = 2^floor(log2 W); 2 rounds of S more "
             "when m < W",
     .order = Order::other}};

}  // namespace
}  // namespace pycollect
