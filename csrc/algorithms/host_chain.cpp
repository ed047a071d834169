// Reductions of ranks on H hosts, in rank order: host h goes on with the sum of the hosts before
// it, which it gets as accumulators, so the result is rounded once, as on one host. Every rail
// moves a share of the data, in P pieces. All-reduce sends the result back along the hosts: 2 (H-1)
// + P - 1 rounds; S per link between hosts and direction. On one host, it is two_shot.
#include "../plan/error.h"
#include "host_rails.h"

namespace pycollect {
namespace {

class HostChain {
 public:
  explicit HostChain(const AlgorithmParams& params)
      // On one host, there is no link for whose sake the data would be cut into pieces.
      : rails(params),
        pieces(rails.hosts().count() == 1 ? 1 : params.pieces),
        plan{params.world, 0} {
    require(rails.hosts().in_rank_order(),
            "host_chain adds host by host, and the ranks of a host are not consecutive; start the "
            "ranks host by host, as torchrun does");
  }

  int last() const { return rails.hosts().count() - 1; }

  // Returns whether the plan must have what the host does, because it or a neighbour is seen.
  bool sees_near(int host) const {
    return rails.sees(host) || rails.sees(host - 1) || rails.sees(host + 1);
  }

  // Adds chunk `c` of the ranks of `host` to the sum of the hosts before it. The last host writes
  // the result to `dsts`.
  void up(int host, int rail, int c, const Slices& dsts) {
    const Rank me = rails.rank(host, rail);
    Slices srcs;
    if (host > 0) srcs.push_back(acc(rails.rank(host - 1, rail), c));
    for (const Rank r : rails.hosts().ranks(host)) srcs.push_back(in(r, c));
    plan.fold(host < last() ? Slices{acc(me, c)} : dsts, std::move(srcs), me);
  }

  const HostRails rails;
  const int pieces;
  Plan plan;
};

// The result goes from host to host in scratch. The ranks of a host fetch a piece one hop later, so
// that a late rail does not keep the others from passing on theirs.
Plan all_reduce(const AlgorithmParams& params) {
  HostChain chain(params);
  const HostRails& rails = chain.rails;
  chain.plan.chunks = rails.count() * chain.pieces;
  const int last = chain.last();
  rails.pipeline(2 * last + 2, chain.pieces, [&](int hop, int piece) {
    for (int rail = 0; rail < rails.count(); ++rail) {
      const int c = rail * chain.pieces + piece, down = 2 * last - hop;  // the host it goes down to
      if (hop <= last) {
        const Rank me = rails.rank(hop, rail);
        if (chain.sees_near(hop)) chain.up(hop, rail, c, {out(me, c), tmp(me, c)});
      } else {
        const Rank above = rails.rank(down + 1, rail);
        if (down >= 0 && chain.sees_near(down))
          rails.pass_on(chain.plan, rails.rank(down, rail), above, c);
        if (rails.sees(down + 1)) rails.hand_out(chain.plan, above, c);
      }
    }
  });
  return std::move(chain.plan);
}

Plan reduce(const AlgorithmParams& params) {
  HostChain chain(params);
  const HostRails& rails = chain.rails;
  chain.plan.chunks = rails.count() * chain.pieces;
  rails.pipeline(chain.last() + 1, chain.pieces, [&](int host, int piece) {
    for (int rail = 0; rail < rails.count(); ++rail) {
      const int c = rail * chain.pieces + piece;
      const Rank me = rails.rank(host, rail);
      if (host == chain.last() || chain.sees_near(host)) chain.up(host, rail, c, {tmp(me, c)});
      if (host == chain.last()) chain.plan.copy(out(params.root, c), tmp(me, c));
    }
  });
  return std::move(chain.plan);
}

// Each block is cut into the pieces, and passes on the rail of its destination.
Plan reduce_scatter(const AlgorithmParams& params) {
  HostChain chain(params);
  const HostRails& rails = chain.rails;
  const int pieces = rails.pieces_of_part(chain.pieces);
  chain.plan.chunks = params.world * pieces;
  rails.pipeline(chain.last() + 1, pieces, [&](int host, int piece) {
    for (Rank to = 0; to < params.world; ++to) {
      const int c = to * pieces + piece, rail = rails.towards(to);
      const Rank me = rails.rank(host, rail);
      const bool own = to == me, ends = host == chain.last() && params.sees(to);
      if (!ends && !chain.sees_near(host)) continue;
      chain.up(host, rail, c, {own ? out(me, c) : tmp(me, c)});
      if (host == chain.last() && !own) chain.plan.copy(out(to, c), tmp(me, c));
    }
  });
  return std::move(chain.plan);
}

constexpr const char* kUpwards = "H - 1 + P rounds; S per link between hosts";

const RegisterAlgorithm kAllReduce{
    {.name = "host_chain",
     .collective = Collective::all_reduce,
     .make = all_reduce,
     .cost = "2 (H-1) + P - 1 rounds between H hosts; S per link and direction"}};
const RegisterAlgorithm kReduce{
    {.name = "host_chain", .collective = Collective::reduce, .make = reduce, .cost = kUpwards}};
const RegisterAlgorithm kReduceScatter{{.name = "host_chain",
                                        .collective = Collective::reduce_scatter,
                                        .make = reduce_scatter,
                                        .cost = kUpwards}};

}  // namespace
}  // namespace pycollect
