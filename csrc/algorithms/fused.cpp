// Fused reduce-scatter and all-gather: the owner of a chunk reads it from every rank and writes the
// sum to every rank. 1 round; every rank reads S and writes S, (W-1)/W of both over its links. For
// several devices or processes that can write into each other's memory.
#include "../plan/registry.h"

namespace pycollect {
namespace {

Plan fused(const AlgorithmParams& params) {
  Plan p{params.world, params.world};
  for (Rank c = 0; c < params.world; ++c)
    p.fold(everyone(out(0, c), params.world), everyone(in(0, c), params.world), c);
  return p;
}

const RegisterAlgorithm kRegister{{.name = "fused",
                                   .collective = Collective::all_reduce,
                                   .make = fused,
                                   .cost = "1 round; each rank reads S and writes S"}};

}  // namespace
}  // namespace pycollect
