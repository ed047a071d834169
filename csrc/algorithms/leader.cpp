// Single pass over all ranks' buffers: rank 0 reads every input once and writes every output, 2 W S
// bytes in all, the minimum. 1 round; rank 0 moves all bytes and the others none. For ranks that
// share one memory, where the executor divides the step's elements among all threads; also for
// ranks on one GPU, and for small data on several.
#include "../plan/registry.h"

namespace pycollect {
namespace {

Plan leader(const AlgorithmParams& params) {
  Plan p{params.world, 1};
  p.fold(everyone(out(0, 0), params.world), everyone(in(0, 0), params.world));
  return p;
}

const RegisterAlgorithm kRegister{{.name = "leader",
                                   .collective = Collective::all_reduce,
                                   .make = leader,
                                   .cost = "1 round; rank 0 reads W S and writes W S"}};

}  // namespace
}  // namespace pycollect
