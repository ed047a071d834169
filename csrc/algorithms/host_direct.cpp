// Reductions of ranks on H hosts by sums of hosts: every host adds up its ranks' data, as
// accumulators, and the host to which a chunk belongs adds the hosts' sums in the order of the
// hosts and rounds once. This is the left fold in rank order only for data whose sum does not
// depend on the order. Every rail moves a share of the data, in pieces. All-reduce: 2 rounds; 2
// (H-1)/H S per link between hosts and direction, the minimum. On one host, it is two_shot.
#include "host_rails.h"

namespace pycollect {
namespace {

class HostDirect {
 public:
  explicit HostDirect(const AlgorithmParams& params)
      : rails(params), hosts(rails.hosts().count()), plan{params.world, 0} {}

  // Adds up the chunk of the ranks of `host` for `owner`, in accumulators unless it is the only
  // host.
  void add_ranks(int host, int owner, int rail, int c, const Slices& dsts) {
    if (!rails.sees(host) && !rails.sees(owner)) return;
    const Rank me = rails.rank(host, rail);
    Slices srcs;
    for (const Rank r : rails.hosts().ranks(host)) srcs.push_back(in(r, c));
    plan.fold(hosts > 1 ? Slices{acc(me, c)} : dsts, std::move(srcs), me);
  }

  // Adds up the chunk of all hosts on `host`.
  void add_hosts(int host, int rail, int c, const Slices& dsts) {
    if (hosts == 1) return;
    Slices srcs;
    for (int h = 0; h < hosts; ++h)
      if (h == host || rails.sees(h) || rails.sees(host))
        srcs.push_back(acc(rails.rank(h, rail), c));
    plan.fold(dsts, std::move(srcs), rails.rank(host, rail));
  }

  const HostRails rails;
  const int hosts;
  Plan plan;
};

int pieces_of(const HostDirect& direct, const AlgorithmParams& params) {
  return direct.hosts == 1 ? 1 : params.pieces;
}

// A rail's share has a part for each host. A host begins with the part of the next host, so that
// not all send to the same one.
Plan all_reduce(const AlgorithmParams& params) {
  HostDirect direct(params);
  const HostRails& rails = direct.rails;
  const int hosts = direct.hosts, pieces = rails.pieces_of_part(pieces_of(direct, params));
  direct.plan.chunks = rails.count() * hosts * pieces;
  rails.pipeline(4, pieces, [&](int hop, int piece) {
    const auto each = [&](int from, int until, const auto& f) {
      for (int shift = from; shift < until; ++shift)
        for (int host = 0; host < hosts; ++host)
          for (int rail = 0; rail < rails.count(); ++rail) {
            const int owner = (host + shift) % hosts;
            f(host, owner, rail, (rail * hosts + owner) * pieces + piece);
          }
    };
    const auto result = [&](Rank me, int c) { return Slices{out(me, c), tmp(me, c)}; };
    if (hop == 0)
      each(1, hosts + 1, [&](int host, int owner, int rail, int c) {
        direct.add_ranks(host, owner, rail, c, result(rails.rank(host, rail), c));
      });
    if (hop == 1)
      each(0, 1, [&](int host, int, int rail, int c) {
        direct.add_hosts(host, rail, c, result(rails.rank(host, rail), c));
      });
    if (hop == 2)
      each(1, hosts, [&](int host, int owner, int rail, int c) {
        if (rails.sees(host) || rails.sees(owner))
          rails.pass_on(direct.plan, rails.rank(host, rail), rails.rank(owner, rail), c);
      });
    if (hop == 3)
      each(0, hosts, [&](int host, int, int rail, int c) {
        if (rails.sees(host)) rails.hand_out(direct.plan, rails.rank(host, rail), c);
      });
  });
  return std::move(direct.plan);
}

// Adds up a chunk for one rank, which fetches it from the rail's rank of its host.
void reduce_to(HostDirect& direct, int hop, Rank to, int rail, int c) {
  const int host = direct.rails.hosts().of(to);
  const Rank me = direct.rails.rank(host, rail);
  const Slices dsts{to == me ? out(me, c) : tmp(me, c)};
  if (hop == 0)
    for (int h = 0; h < direct.hosts; ++h) direct.add_ranks(h, host, rail, c, dsts);
  if (hop == 1) {
    direct.add_hosts(host, rail, c, dsts);
    if (to != me) direct.plan.copy(out(to, c), tmp(me, c));
  }
}

Plan reduce(const AlgorithmParams& params) {
  HostDirect direct(params);
  const int pieces = pieces_of(direct, params), rails = direct.rails.count();
  direct.plan.chunks = rails * pieces;
  HostRails::pipeline(2, pieces, [&](int hop, int piece) {
    for (int rail = 0; rail < rails; ++rail)
      reduce_to(direct, hop, params.root, rail, rail * pieces + piece);
  });
  return std::move(direct.plan);
}

Plan reduce_scatter(const AlgorithmParams& params) {
  HostDirect direct(params);
  const int pieces = direct.rails.pieces_of_part(pieces_of(direct, params));
  direct.plan.chunks = params.world * pieces;
  HostRails::pipeline(2, pieces, [&](int hop, int piece) {
    for (Rank to = 0; to < params.world; ++to)
      reduce_to(direct, hop, to, direct.rails.towards(to), to * pieces + piece);
  });
  return std::move(direct.plan);
}

constexpr const char* kToOne = "1 round between H hosts; S per link";

const RegisterAlgorithm kAllReduce{
    {.name = "host_direct",
     .collective = Collective::all_reduce,
     .make = all_reduce,
     .cost = "2 rounds between H hosts; 2 (H-1)/H S per link and direction",
     .order = Order::other}};
const RegisterAlgorithm kReduce{{.name = "host_direct",
                                 .collective = Collective::reduce,
                                 .make = reduce,
                                 .cost = kToOne,
                                 .order = Order::other}};
const RegisterAlgorithm kReduceScatter{{.name = "host_direct",
                                        .collective = Collective::reduce_scatter,
                                        .make = reduce_scatter,
                                        .cost = kToOne,
                                        .order = Order::other}};

}  // namespace
}  // namespace pycollect
