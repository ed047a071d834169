// Direct algorithms: the source or the destination of a block moves it in a single step, so every
// collective here takes 1 round. S is the size of a rank's full buffer. Broadcast sends (W-1) S
// from the root and reduce reads as much there; all-gather, reduce-scatter and all-to-all move
// (W-1)/W S per rank and direction; scatter and gather move that at the root and S/W elsewhere.
// Sizes are in `PlanOffsets`, so uneven blocks and all-to-all-v use the same plans.
#include "../plan/registry.h"

namespace pycollect {
namespace {

Plan broadcast(const AlgorithmParams& params) {
  Plan p{params.world, 1};
  p.fold(everyone(out(0, 0), params.world), {in(params.root, 0)}, params.root);
  return p;
}

Plan reduce(const AlgorithmParams& params) {
  Plan p{params.world, 1};
  p.fold({out(params.root, 0)}, everyone(in(0, 0), params.world));
  return p;
}

Plan all_gather(const AlgorithmParams& params) {
  Plan p{params.world, params.world};
  for (Rank c = 0; c < params.world; ++c) p.fold(everyone(out(0, c), params.world), {in(c, c)}, c);
  return p;
}

Plan reduce_scatter(const AlgorithmParams& params) {
  Plan p{params.world, params.world};
  for (Rank me = 0; me < params.world; ++me)
    p.fold({out(me, me)}, everyone(in(0, me), params.world));
  return p;
}

// In place, this plan would read blocks that are already overwritten: a valid plan with another
// result. Each rank starts at its own block and proceeds in rank order, so that the ranks read from
// different ports.
Plan all_to_all(const AlgorithmParams& params) {
  Plan p{params.world, params.world};
  for (int shift = 0; shift < params.world; ++shift)
    for (Rank me = 0; me < params.world; ++me) {
      const Rank from = (me + shift) % params.world;
      p.copy(out(me, from), in(from, me));
    }
  return p;
}

Plan scatter(const AlgorithmParams& params) {
  Plan p{params.world, params.world};
  for (Rank me = 0; me < params.world; ++me) p.copy(out(me, me), in(params.root, me));
  return p;
}

Plan gather(const AlgorithmParams& params) {
  Plan p{params.world, params.world};
  for (Rank r = 0; r < params.world; ++r) p.copy(out(params.root, r), in(r, r));
  return p;
}

const RegisterAlgorithm kBroadcast{{.name = "direct",
                                    .collective = Collective::broadcast,
                                    .make = broadcast,
                                    .cost = "1 round; the root sends (W-1) S"}};
const RegisterAlgorithm kReduce{{.name = "direct",
                                 .collective = Collective::reduce,
                                 .make = reduce,
                                 .cost = "1 round; the root reads (W-1) S from the others"}};
const RegisterAlgorithm kAllGather{{.name = "direct",
                                    .collective = Collective::all_gather,
                                    .make = all_gather,
                                    .cost = "1 round; each rank sends its S/W to W-1 others"}};
const RegisterAlgorithm kReduceScatter{
    {.name = "direct",
     .collective = Collective::reduce_scatter,
     .make = reduce_scatter,
     .cost = "1 round; each rank reads (W-1)/W S from the others"}};
const RegisterAlgorithm kAllToAll{{.name = "direct",
                                   .collective = Collective::all_to_all,
                                   .make = all_to_all,
                                   .cost = "1 round; each rank reads (W-1)/W S from the others",
                                   .in_place = false}};
const RegisterAlgorithm kScatter{{.name = "direct",
                                  .collective = Collective::scatter,
                                  .make = scatter,
                                  .cost = "1 round; the root sends (W-1)/W S"}};
const RegisterAlgorithm kGather{{.name = "direct",
                                 .collective = Collective::gather,
                                 .make = gather,
                                 .cost = "1 round; the root receives (W-1)/W S"}};

}  // namespace
}  // namespace pycollect
