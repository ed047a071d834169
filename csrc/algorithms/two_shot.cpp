// Reduce-scatter and all-gather by reads: every rank adds up one chunk, then copies the other
// chunks from their owners. 2 rounds; 2 (W-1)/W S per rank and direction, the minimum. The copies
// start at the right neighbour's chunk, so that the ranks read from different ports.
#include "../plan/registry.h"

namespace pycollect {
namespace {

Plan two_shot(const AlgorithmParams& params) {
  Plan p{params.world, params.world};
  for (Rank me = 0; me < params.world; ++me)
    p.fold({out(me, me)}, everyone(in(0, me), params.world));
  for (int shift = 1; shift < params.world; ++shift)
    for (Rank me = 0; me < params.world; ++me) {
      const Rank from = (me + shift) % params.world;
      p.copy(out(me, from), out(from, from));
    }
  return p;
}

const RegisterAlgorithm kRegister{
    {.name = "two_shot",
     .collective = Collective::all_reduce,
     .make = two_shot,
     .cost = "2 rounds; each rank reads 2 (W-1)/W S from the others"}};

}  // namespace
}  // namespace pycollect
