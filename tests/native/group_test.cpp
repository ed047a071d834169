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

// --- a rank is late, dies, fails or is stopped while a group is formed ---

// Ranks that never join: every other rank names them. A rank that begins later fails together with
// the first one.
void names_missing_ranks() {
  const struct {
    std::vector<Rank> joining;
    std::chrono::milliseconds later, timeout;
    const char* message;
  } cases[] = {{{0, 2}, 0ms, 400ms, "0.4 s; ranks 1, 3 did not arrive"},
               {{2}, 0ms, 400ms, "0.4 s; rank 0 did not arrive"},
               {{0, 2, 3}, 200ms, 1000ms, "1 s; rank 1 did not arrive"}};
  for (const auto& it : cases) {
    const auto ends = run(4, quick_settings(it.timeout), [&](RankContext& me) {
      if (std::ranges::find(it.joining, me.rank) == it.joining.end()) return std::string("absent");
      std::this_thread::sleep_for(me.rank * it.later);
      return join(me);
    });
    for (const Rank r : it.joining)
      expect_equal(ends[r].result, text("Timeout: group 'default': Timed out after ", it.message));
  }
}

// The victim sends itself `signal` before or after it publishes its PeerInfo; the others read
// rank 0's PeerInfo 100 ms late.
Body exchange_with_victim(Rank victim, bool posted, int signal) {
  return [=](RankContext& me) {
    const auto falsify = [&me, victim, signal](bool now) {
      return [=, &me](const std::string& key, const std::string& value) {
        if (now && me.rank == victim && key == text("hello/", victim)) kill(getpid(), signal);
        if (key == "hello/0") std::this_thread::sleep_for(100ms);
        return value;
      };
    };
    me.store.on_post = falsify(!posted);
    me.store.on_read = falsify(posted);  // a rank reads its own PeerInfo when it has published it
    return join(me);
  };
}

// A rank dies during the rendezvous, before or after it has published its PeerInfo: the others fail
// without a timeout.
void detects_deaths_meanwhile() {
  for (const auto& [victim, posted] : {std::pair{1, false}, {1, true}, {0, true}}) {
    const auto ends = run(3, quick_settings(), exchange_with_victim(victim, posted, SIGKILL));
    expect(ends[victim].killed, "the victim lives");
    expect_each_part(ends, "PeerLost: ");
    expect_each_part(ends, text("rank ", victim, " (pid "));
    if (!posted) expect_each_part(ends, ") died before all ranks had joined");
  }
}

// Rank 1's store fails, but its process lives on: before or after it has published its PeerInfo.
void reports_failures_meanwhile() {
  for (const bool posted : {false, true}) {
    const auto ends = run(3, quick_settings(), [=](RankContext& me) {
      (posted ? me.store.on_read : me.store.on_post) = [&](const auto& key, const auto& value) {
        if (me.rank == 1 && key == "hello/1") throw std::runtime_error("no store");
        return value;
      };
      const std::string message = attempt([&] { return join(me); });
      if (me.rank == 1) std::this_thread::sleep_for(3s);
      return message;
    });
    expect_equal(ends[1].result, "exception: no store");
    for (Rank r : {0, 2}) {
      expect_equal(ends[r].result, text("PeerLost: ", posted ? "exchange #1 of " : "",
                                        "group 'default': rank 1 gave up: no store"));
      expect(ends[r].elapsed < 2s, "took too long");
    }
  }
}

// A rank that has read every PeerInfo may leave before another rank has read its own.
void lets_ranks_leave_early() {
  const auto ends = run(3, quick_settings(), [](RankContext& me) {
    me.store.on_read = [late = me.rank == 2](const auto& key, const auto& value) mutable {
      if (key != "hello/1" || !std::exchange(late, false)) return value;
      std::this_thread::sleep_for(300ms);
      throw Timeout("a slow store");
    };
    Group group(me.store, me.rank, me.world, me.settings);
    return std::string("right");
  });
  expect_each(ends, "right");
}

// A stopped rank 0 does not answer fetches, and is not dead: the others wait until the timeout.
void waits_for_stopped_rank() {
  for (const bool goes_on : {false, true}) {
    const auto ends = run(3, quick_settings(600ms), [&](RankContext& me) {
      if (const pid_t rank = getpid(); me.rank == 0 && fork() == 0) {
        std::this_thread::sleep_for(goes_on ? 300ms : 1500ms);
        kill(rank, goes_on ? SIGCONT : SIGKILL);
        _exit(0);
      }
      return exchange_with_victim(0, true, SIGSTOP)(me);
    });
    expect_each(ends, goes_on ? "right"
                              : "Timeout: group 'default': Timed out after 0.6 s; "
                                "rank 0 did not arrive");
  }
}

}  // namespace
}  // namespace pycollect::ipc

int main() {
  using namespace pycollect::ipc;
  pycollect::run_tests({{"threads exchange", threads_exchange}, {"shares cores", shares_cores}});
  if (pycollect::forks())
    pycollect::run_tests({{"refuses other records", refuses_other_records},
                          {"names rank without memory", names_rank_without_memory},
                          {"names missing ranks", names_missing_ranks},
                          {"detects deaths meanwhile", detects_deaths_meanwhile},
                          {"reports failures meanwhile", reports_failures_meanwhile},
                          {"lets ranks leave early", lets_ranks_leave_early},
                          {"waits for stopped rank", waits_for_stopped_rank}});
}
