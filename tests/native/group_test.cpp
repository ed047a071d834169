// Groups: ranks share memory and wait for each other, or every rank throws an error that names the
// reason.
#include <sys/resource.h>

#include <optional>

#include "../../csrc/group/fd_server.h"
#include "../../csrc/group/placement.h"
#include "../../csrc/group/rendezvous.h"
#include "ranks.h"

namespace pycollect::ipc {
namespace {

// In one mapping, where ThreadSanitizer sees all accesses. Each rank is late in turn, so that the
// others go through all stages of waiting. An abort by another thread ends the last wait.
void threads_exchange() {
  const auto ends = run_threads(3, quick_settings(), [](RankContext& me) {
    Group group(me.store, me.rank, me.world, me.settings);
    expect_equal(exchange(group, 5ms), "right");
    std::jthread other([&] {
      if (me.rank == 1) group.abort("the end");
    });
    return refusal([&] { group.await((me.rank + 1) % me.world, at_run(99), me.context(30s)); });
  });
  expect_each(ends,
              "PeerLost: all_reduce #17 of group 'default': rank 1 aborted the group: the end");
}

Falsify with_record(const std::function<void(PeerInfo&)>& change) {
  return [=](const std::string&, const std::string& value) {
    PeerInfo it = PeerInfo::decode(value);
    change(it);
    return it.encode();
  };
}

// One rank publishes or reads another record than its own. The first case imitates containers with
// different networks, which isolation_test.cpp makes.
void refuses_other_records() {
  std::shared_ptr<Segment> segment;
  std::optional<FdServer> fd_server;
  const struct {
    Rank rank;
    Falsify on_post, on_read;
    std::vector<std::string> parts;
  } cases[] = {
      {0,
       with_record([](PeerInfo& it) { it.fd_server = 7, it.network_space = 1; }),
       {},
       {"CollectiveError: the ranks of group 'default' cannot share memory; ranks 1, 2: cannot "
        "reach the Unix socket @pycollect-fd-server-7",
        "; rank 0 is in another network namespace than ranks 1, 2, and all ranks need the same"}},
      {1,
       [](const std::string&, const std::string& value) {
         return "pycollect-1" + value.substr(11);
       },
       {},
       {"must run the same version"}},
      {1,
       {},
       [&](const std::string& key, const std::string& value) {
         if (!segment) segment = Segment::create(1 << 20);
         const auto elsewhere = [&](PeerInfo& it) {
           it.fd_server = fd_server.emplace(segment->descriptor()).id();
         };
         return key == "hello/0" ? with_record(elsewhere)(key, value) : value;
       },
       {"mapped different shared memory"}}};
  for (const auto& it : cases) {
    const auto ends = run(3, quick_settings(), [&](RankContext& me) {
      if (me.rank == it.rank) me.store.on_post = it.on_post, me.store.on_read = it.on_read;
      return join(me);
    });
    for (const std::string& part : it.parts) expect_each_part(ends, part);
  }
}

void names_rank_without_memory() {
  const auto ends = run(3, quick_settings(), [](RankContext& me) {
    const rlimit least = {64 << 10, 64 << 10};
    if (me.rank == 0) setrlimit(RLIMIT_FSIZE, &least);
    return join(me);
  });
  expect_each_part(ends, "cannot share memory; rank 0: shared memory of 1 MiB exceeds the limit");
}

CoreSet cores(int begin, int end) {
  CoreSet set = {};
  for (int core = begin; core < end; ++core) set.set(core);
  return set;
}

// The cores of which each rank may use a share, on a made-up machine of two NUMA nodes.
void shares_cores() {
  const NumaNodes nodes{{0, cores(0, 32)}, {1, cores(32, 64)}};
  const CoreSet left = cores(0, 32), right = cores(32, 64), all = cores(0, 64), unknown = {};
  const auto shares = [&](const std::vector<CoreSet>& ranks) {
    std::string all_shares;
    for (Rank r = 0; r < static_cast<Rank>(ranks.size()); ++r)
      all_shares += text(core_share(nodes, ranks, r), " ");
    return all_shares;
  };
  expect_equal(shares({all, all, all, all}), "16 16 16 16 ");            // not bound
  expect_equal(shares({left, left, right, right}), "16 16 16 16 ");      // bound
  expect_equal(shares({left, right, right, right}), "32 10 10 10 ");     // unevenly
  expect_equal(shares({all, right, right}), "42 10 10 ");                // partly: 32 + 32 / 3
  expect_equal(shares({cores(0, 1), cores(1, 2), right}), "16 16 32 ");  // main threads only
  expect_equal(shares({unknown, left}), "0 32 ");
  expect_equal(shares(std::vector<CoreSet>(40, left)).substr(0, 4), "1 1 ");  // crowded
  expect(core_share({}, {all}, 0) == 0, "no nodes");
}

}  // namespace
}  // namespace pycollect::ipc

int main() {
  using namespace pycollect::ipc;
  pycollect::run_tests({{"threads exchange", threads_exchange}, {"shares cores", shares_cores}});
  if (pycollect::forks())
    pycollect::run_tests({{"refuses other records", refuses_other_records},
                          {"names rank without memory", names_rank_without_memory}});
}
