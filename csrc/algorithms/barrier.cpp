// Barrier: no rank leaves before all have entered. One step reads and writes every rank's scratch,
// which is empty. 1 round, no bytes; the waits that `lower` finds for the step form the barrier.
#include "../plan/registry.h"

namespace pycollect {
namespace {

Plan barrier(const AlgorithmParams& params) {
  Plan p{params.world, 1};
  p.fold(everyone(tmp(0, 0), params.world), everyone(tmp(0, 0), params.world));
  return p;
}

const Register kRegister{{.name = "barrier",
                          .collective = Collective::barrier,
                          .make = barrier,
                          .cost = "1 round; no bytes"}};

}  // namespace
}  // namespace pycollect
