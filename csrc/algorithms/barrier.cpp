// Barrier: no rank leaves before all have entered. One step has every rank's scratch, of no bytes,
// as source and destination, so `lower` makes every rank wait for every other. 1 round, no bytes.
#include "../plan/registry.h"

namespace pycollect {
namespace {

Plan barrier(const AlgorithmParams& params) {
  Plan p{params.world, 1};
  p.fold(everyone(tmp(0, 0), params.world), everyone(tmp(0, 0), params.world));
  return p;
}

const RegisterAlgorithm kRegister{{.name = "barrier",
                                   .collective = Collective::barrier,
                                   .make = barrier,
                                   .cost = "1 round; no bytes"}};

}  // namespace
}  // namespace pycollect
