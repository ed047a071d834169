// Barrier: no rank leaves before all have entered. On one host, the only step reads and writes
// every rank's scratch, of no bytes, so `lower` orders it after the first task and before the last
// task of every rank. Between hosts, first ranks copy: each host's ranks meet, its first rank gets
// a copy from every other host's, and then releases the ranks of its host. No bytes.
#include <utility>

#include "../plan/hosts.h"
#include "../plan/registry.h"

namespace pycollect {
namespace {

Slices scratch_of(const std::vector<Rank>& ranks, int chunk) {
  Slices all;
  for (const Rank r : ranks) all.push_back(tmp(r, chunk));
  return all;
}

// Chunk h stands for host h: that all its ranks have entered. A rank that is alone on its host
// reads its scratch twice, because a step with one source and the same destination does nothing.
Plan barrier(const AlgorithmParams& params) {
  const Hosts hosts = hosts_or_one(params.hosts, params.world);
  const int count = hosts.count();
  Plan p{params.world, count};
  if (count == 1) {
    p.fold(everyone(tmp(0, 0), params.world), everyone(tmp(0, 0), params.world));
    return p;
  }
  const auto first = [&](int host) { return hosts.ranks(host)[0]; };
  for (int h = 0; h < count; ++h) {
    Slices srcs = scratch_of(hosts.ranks(h), h);
    if (srcs.size() == 1) srcs.push_back(srcs[0]);
    p.fold({tmp(first(h), h)}, std::move(srcs));
  }
  const auto sees = [&](int host) { return params.sees(first(host)); };
  for (int h = 0; h < count; ++h)
    for (int other = 0; other < count; ++other)
      if (other != h && (sees(h) || sees(other)))
        p.copy(tmp(first(h), other), tmp(first(other), other));
  for (int h = 0; h < count; ++h) {
    if (!sees(h)) continue;
    Slices srcs;
    for (int other = 0; other < count; ++other) srcs.push_back(tmp(first(h), other));
    p.fold(scratch_of(hosts.ranks(h), 0), std::move(srcs), first(h));
  }
  return p;
}

const RegisterAlgorithm kRegister{{.name = "barrier",
                                   .collective = Collective::barrier,
                                   .make = barrier,
                                   .cost = "1 round, or 3 over several hosts; no bytes"}};

}  // namespace
}  // namespace pycollect
