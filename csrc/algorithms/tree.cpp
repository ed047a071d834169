// A binomial tree up to rank 0 and down again. 2 ceil(log2 W) rounds of S; rank 0 reads and sends
// ceil(log2 W) S, a leaf S. Adds pairs of neighbours first, so results differ from the left fold.
#include "../plan/registry.h"

namespace pycollect {
namespace {

Plan tree(const AlgorithmParams& params) {
  const int n = params.world;
  Plan p{n, 1};
  int span = 1;  // number of ranks in the subtree of one node
  for (; span < n; span *= 2)
    for (Rank r = 0; r + span < n; r += 2 * span) {
      auto has = [&](Rank x) { return span == 1 || x + 1 >= n ? in(x, 0) : out(x, 0); };
      p.fold({out(r, 0)}, {has(r), has(r + span)});  // each a leaf or a partial sum
    }
  for (span /= 2; span >= 1; span /= 2)
    for (Rank r = 0; r + span < n; r += 2 * span) p.copy(out(r + span, 0), out(r, 0));
  return p;
}

const RegisterAlgorithm kRegister{
    {.name = "tree",
     .collective = Collective::all_reduce,
     .make = tree,
     .cost = "2 ceil(log2 W) rounds of S; at most ceil(log2 W) S per rank",
     .order = Order::other}};

}  // namespace
}  // namespace pycollect
