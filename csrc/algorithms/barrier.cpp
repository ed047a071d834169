// Barrier: no rank leaves before all have entered. The only step reads and writes every rank's
// scratch, of no bytes, so `lower` orders it after the first task and before the last task of every
// rank.
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
