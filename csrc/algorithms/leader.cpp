// One step over all ranks: rank 0 reads every input once and writes every output, 2 W S bytes in
// all, the least there is. 1 round; rank 0 moves everything and the others nothing, so it is for
// ranks that share one memory, where the executor splits the step by elements.
#include "../plan/registry.h"

namespace pycollect {
namespace {

Plan leader(const Ask& ask) {
  Plan p{ask.world, 1};
  p.fold(everyone(out(0, 0), ask.world), everyone(in(0, 0), ask.world));
  return p;
}

const Register kRegister{{.name = "leader",
                          .collective = Collective::all_reduce,
                          .make = leader,
                          .cost = "1 round; rank 0 reads W S and writes W S"}};

}  // namespace
}  // namespace pycollect
