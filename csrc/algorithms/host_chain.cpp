// Reductions of ranks on H hosts, in rank order: host h goes on with the sum of the hosts before
// it, which it gets as accumulators, so the result is rounded once, as on one host. Every rail (one
// rank of each host) moves a share of the data, in P pieces, a few of which are under way at a
// time. All-reduce sends the result back along the hosts: 2 (H-1) + P - 1 rounds; S per link
// between hosts and direction. On one host, it is two_shot.
#include "../plan/error.h"
#include "../plan/hosts.h"
#include "../plan/registry.h"

namespace pycollect {
namespace {

class HostChain {
 public:
  // `chunks`: number of chunks. Hosts pass on the chunk `c` on the rail `rail_of(c)`.
  HostChain(const Hosts& hosts, int chunks) : hosts_(hosts), plan_{hosts.world(), chunks} {
    require(hosts.in_rank_order(),
            "host_chain adds host by host, and the ranks of a host are not consecutive; start the "
            "ranks host by host, as torchrun does");
  }

  int last() const { return hosts_.count() - 1; }
  Rank rail(int host, int rail) const { return hosts_.ranks(host)[rail]; }
  const Hosts& hosts() const { return hosts_; }

  // Adds chunk `c` of the ranks of `host` to the sum of the hosts before it. The last host writes
  // the result to `dsts`.
  void up(int host, int rail, int c, const Slices& dsts) {
    const Rank me = this->rail(host, rail);
    Slices srcs;
    if (host > 0) srcs.push_back(acc(this->rail(host - 1, rail), c));
    for (const Rank r : hosts_.ranks(host)) srcs.push_back(in(r, c));
    plan_.fold(host < last() ? Slices{acc(me, c)} : dsts, std::move(srcs), me);
  }
  void copy(Slice dst, Slice src) { plan_.copy(dst, src); }

  // Calls `round(hop, piece)` for every piece and hop. A rank that waits for a piece has begun
  // kAhead more for every hop between, so that the links are busy meanwhile.
  template <class Round>
  static void pipeline(int hops, int pieces, const Round& round) {
    constexpr int kAhead = 4;
    for (int time = 0; time < kAhead * (hops - 1) + pieces; ++time)
      for (int hop = 0; hop < hops; ++hop) {
        const int piece = time - kAhead * hop;
        if (piece >= 0 && piece < pieces) round(hop, piece);
      }
  }

  Plan take() { return std::move(plan_); }

 private:
  const Hosts& hosts_;
  Plan plan_;
};

// On one host, there is no link for whose sake the data would be cut into pieces.
int pieces_of(const Hosts& hosts, const AlgorithmParams& params) {
  return hosts.count() == 1 ? 1 : params.pieces;
}

// The result goes from host to host in scratch. The ranks of a host fetch a piece one hop later, so
// that a late rail does not keep the others from passing on theirs.
Plan all_reduce(const AlgorithmParams& params) {
  const Hosts hosts = hosts_or_one(params.hosts, params.world);
  const int pieces = pieces_of(hosts, params);
  HostChain chain(hosts, hosts.rails() * pieces);
  const int last = chain.last();
  const auto pass_on = [&](int host, int rail, int c) {
    const Rank me = chain.rail(host, rail);
    chain.copy(tmp(me, c), tmp(chain.rail(host + 1, rail), c));
    chain.copy(out(me, c), tmp(me, c));
  };
  const auto hand_out = [&](int host, int rail, int c) {
    const Rank me = chain.rail(host, rail);
    for (const Rank r : hosts.ranks(host))
      if (r != me) chain.copy(out(r, c), tmp(me, c));
  };
  HostChain::pipeline(2 * last + 2, pieces, [&](int hop, int piece) {
    for (int rail = 0; rail < hosts.rails(); ++rail) {
      const int c = rail * pieces + piece, down = 2 * last - hop;  // the host that gets the result
      if (hop <= last) {
        const Rank me = chain.rail(hop, rail);
        chain.up(hop, rail, c, {out(me, c), tmp(me, c)});
      } else {
        if (down >= 0) pass_on(down, rail, c);
        hand_out(down + 1, rail, c);
      }
    }
  });
  return chain.take();
}

Plan reduce(const AlgorithmParams& params) {
  const Hosts hosts = hosts_or_one(params.hosts, params.world);
  const int pieces = pieces_of(hosts, params);
  HostChain chain(hosts, hosts.rails() * pieces);
  HostChain::pipeline(hosts.count(), pieces, [&](int host, int piece) {
    for (int rail = 0; rail < hosts.rails(); ++rail) {
      const int c = rail * pieces + piece;
      chain.up(host, rail, c, {tmp(chain.rail(host, rail), c)});
      if (host == chain.last()) chain.copy(out(params.root, c), tmp(chain.rail(host, rail), c));
    }
  });
  return chain.take();
}

// Each block is cut into the pieces, and passes on the rail of its destination.
Plan reduce_scatter(const AlgorithmParams& params) {
  const Hosts hosts = hosts_or_one(params.hosts, params.world);
  const int pieces = pieces_of(hosts, params);
  HostChain chain(hosts, params.world * pieces);
  HostChain::pipeline(hosts.count(), pieces, [&](int host, int piece) {
    for (Rank to = 0; to < params.world; ++to) {
      const int c = to * pieces + piece, rail = hosts.index(to) % hosts.rails();
      const Rank me = chain.rail(host, rail);
      const bool own = to == me;
      chain.up(host, rail, c, {own ? out(me, c) : tmp(me, c)});
      if (host == chain.last() && !own) chain.copy(out(to, c), tmp(me, c));
    }
  });
  return chain.take();
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
