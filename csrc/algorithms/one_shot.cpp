// Every rank copies its input to its scratch, which the others can read, then adds up all copies
// itself. 2 rounds, the first without a link; every rank reads (W-1) S over its links. For small
// messages, where only the number of rounds matters.
#include "../plan/registry.h"

namespace pycollect {
namespace {

Plan one_shot(const AlgorithmParams& params) {
  Plan p{params.world, 1};
  for (Rank me = 0; me < params.world; ++me) p.copy(tmp(me, 0), in(me, 0));
  for (Rank me = 0; me < params.world; ++me)
    p.fold({out(me, 0)}, everyone(tmp(0, 0), params.world));
  return p;
}

const RegisterAlgorithm kRegister{{.name = "one_shot",
                                   .collective = Collective::all_reduce,
                                   .make = one_shot,
                                   .cost = "2 rounds; each rank reads (W-1) S from the others"}};

}  // namespace
}  // namespace pycollect
