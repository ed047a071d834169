// The classic ring: chunk c is added up along the ring from rank c on, then passed on once more.
// 2 (W-1) rounds of S/W; 2 (W-1)/W S per link, the least that links can do. Every chunk is added in
// another order, so results differ from the left fold.
#include "../plan/registry.h"

namespace pycollect {
namespace {

Plan rotated_ring(const Ask& ask) {
  const int n = ask.world;
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

const Register kRegister{{.name = "rotated_ring",
                          .collective = Collective::all_reduce,
                          .make = rotated_ring,
                          .cost = "2 (W-1) rounds of S/W; 2 (W-1)/W S per link",
                          .order = Order::other}};

}  // namespace
}  // namespace pycollect
