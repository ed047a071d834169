// Groups: ranks share memory and wait for each other, or every rank throws an error that names the
// reason.
#include <sys/resource.h>

#include <optional>

#include "../../csrc/group/fd_server.h"
#include "../../csrc/group/rendezvous.h"
#include "ranks.h"

namespace pycollect::ipc {
namespace {

const uint64_t kGoal = at_run(5) + 1;

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

void processes_exchange() {
  for (const int world : {1, 2, 8}) expect_each(run(world, quick_settings(), join), "right");
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

// Rank 1 is killed; the others wait for its counter, and rank 2 for a condition.
void detects_a_death() {
  const auto ends = run(3, quick_settings(), [](RankContext& me) {
    Group group(me.store, me.rank, me.world, me.settings);
    group.advance(at_run(5));
    for (Rank r = 0; r < 3; ++r) group.await(r, at_run(5), me.context(10s));
    if (me.rank == 1) kill(getpid(), SIGKILL);
    const std::string message = refusal([&] {
      if (me.rank == 0) return group.await(1, kGoal, me.context(10s));
      group.await([] { return false; }, {.missing = [] { return std::vector<Rank>{1}; }},
                  me.context(10s));
    });
    expect_part(refusal([&] { group.require_healthy({"broadcast", 18, Clock::now()}); }),
                "broadcast #18 of group 'default': broken since all_reduce #17: rank 1");
    return message;
  });
  expect_each_part(ends, "PeerLost: all_reduce #17 of group 'default': rank 1 (pid ");
  expect_each_part(ends, ") died; ranks 0, 2 are alive");
}

// A forked child of a rank, such as a data loader's, can neither use the group nor abort it.
void rejects_forked_children() {
  const auto ends = run(2, quick_settings(), [](RankContext& me) {
    auto group = std::make_unique<Group>(me.store, me.rank, me.world, me.settings);
    expect_in_child([&] {
      expect_part(refusal([&] { group->require_healthy(me.context(1s)); }), "forked child of rank");
      group->abort("not mine");
      group.reset();
    });
    return exchange(*group);
  });
  expect_each(ends, "right");
}

}  // namespace
}  // namespace pycollect::ipc

int main() {
  using namespace pycollect::ipc;
  pycollect::run_tests({{"threads exchange", threads_exchange}});
  if (pycollect::forks())
    pycollect::run_tests({{"processes exchange", processes_exchange},
                          {"refuses other records", refuses_other_records},
                          {"names rank without memory", names_rank_without_memory},
                          {"detects a death", detects_a_death},
                          {"rejects forked children", rejects_forked_children}});
}
