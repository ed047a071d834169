// Nobody leaves before all have entered: one step that reads and writes everybody's scratch, which
// is empty. 1 round, no bytes; the waits that `lower` finds for it are the whole barrier.
#include "../plan/registry.h"

namespace pycollect {
namespace {

Plan barrier(const Ask& ask) {
  Plan p{ask.world, 1};
  p.fold(everyone(tmp(0, 0), ask.world), everyone(tmp(0, 0), ask.world));
  return p;
}

const Register kRegister{{.name = "barrier",
                          .collective = Collective::barrier,
                          .make = barrier,
                          .cost = "1 round; no bytes"}};

}  // namespace
}  // namespace pycollect
