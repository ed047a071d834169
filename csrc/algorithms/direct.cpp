// Whoever has a block, or must have it, moves it in a single step: 1 round for each collective
// here. S is what a rank holds whole: broadcast sends (W-1) S from the root and reduce reads as
// much there; all-gather, reduce-scatter and all-to-all move (W-1)/W S per rank and direction;
// scatter and gather move that at the root and S/W elsewhere. Sizes live in `Offsets`, so uneven
// blocks and all-to-all-v are the same plans.
#include "../plan/registry.h"

namespace pycollect {
namespace {

Plan broadcast(const Ask& ask) {
  Plan p{ask.world, 1};
  p.fold(everyone(out(0, 0), ask.world), {in(ask.root, 0)}, ask.root);
  return p;
}

Plan reduce(const Ask& ask) {
  Plan p{ask.world, 1};
  p.fold({out(ask.root, 0)}, everyone(in(0, 0), ask.world));
  return p;
}

Plan all_gather(const Ask& ask) {
  Plan p{ask.world, ask.world};
  for (Rank c = 0; c < ask.world; ++c) p.fold(everyone(out(0, c), ask.world), {in(c, c)}, c);
  return p;
}

Plan reduce_scatter(const Ask& ask) {
  Plan p{ask.world, ask.world};
  for (Rank me = 0; me < ask.world; ++me) p.fold({out(me, me)}, everyone(in(0, me), ask.world));
  return p;
}

// In place it would read blocks that have already been overwritten: a valid plan, but of something
// else. A rank begins with its own block and goes on around, so that no port is asked by all.
Plan all_to_all(const Ask& ask) {
  Plan p{ask.world, ask.world};
  for (int shift = 0; shift < ask.world; ++shift)
    for (Rank me = 0; me < ask.world; ++me) {
      const Rank from = (me + shift) % ask.world;
      p.copy(out(me, from), in(from, me));
    }
  return p;
}

Plan scatter(const Ask& ask) {
  Plan p{ask.world, ask.world};
  for (Rank me = 0; me < ask.world; ++me) p.copy(out(me, me), in(ask.root, me));
  return p;
}

Plan gather(const Ask& ask) {
  Plan p{ask.world, ask.world};
  for (Rank r = 0; r < ask.world; ++r) p.copy(out(ask.root, r), in(r, r));
  return p;
}

const Register kBroadcast{{.name = "direct",
                           .collective = Collective::broadcast,
                           .make = broadcast,
                           .cost = "1 round; the root sends (W-1) S"}};
const Register kReduce{{.name = "direct",
                        .collective = Collective::reduce,
                        .make = reduce,
                        .cost = "1 round; the root reads (W-1) S from the others"}};
const Register kAllGather{{.name = "direct",
                           .collective = Collective::all_gather,
                           .make = all_gather,
                           .cost = "1 round; each rank sends its S/W to W-1 others"}};
const Register kReduceScatter{{.name = "direct",
                               .collective = Collective::reduce_scatter,
                               .make = reduce_scatter,
                               .cost = "1 round; each rank reads (W-1)/W S from the others"}};
const Register kAllToAll{{.name = "direct",
                          .collective = Collective::all_to_all,
                          .make = all_to_all,
                          .cost = "1 round; each rank reads (W-1)/W S from the others",
                          .in_place = false}};
const Register kScatter{{.name = "direct",
                         .collective = Collective::scatter,
                         .make = scatter,
                         .cost = "1 round; the root sends (W-1)/W S"}};
const Register kGather{{.name = "direct",
                        .collective = Collective::gather,
                        .make = gather,
                        .cost = "1 round; the root receives (W-1)/W S"}};

}  // namespace
}  // namespace pycollect
