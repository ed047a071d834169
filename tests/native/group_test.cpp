// Groups: ranks share memory, or every rank throws an error that names the reason; a destroyed
// group leaks nothing.
#include <sys/resource.h>

#include <optional>

#include "../../csrc/bootstrap/fd_server.h"
#include "group_ranks.h"

namespace pycollect::ipc {
namespace {

void ranks_exchange() {
  for (int world : {1, 2, 3, 8})
    for (const RankExit& end : run(world, quick_settings(), join_and_exchange))
      expect_equal(end.result, "right");
}

// Returns a body in which rank `changed` applies `change` to the PeerInfo that it publishes.
Body exchange_with_record(Rank changed, const std::function<void(PeerInfo&)>& change) {
  return [=](RankContext& me) {
    FaultyStore store(me.store, [&](const std::string&, const std::string& value) {
      if (me.rank != changed) return value;
      PeerInfo it = PeerInfo::decode(value);
      change(it);
      return it.encode();
    });
    RankContext other{me.rank, me.world, store, me.settings};
    return join_and_exchange(other);
  };
}

void refuses_several_hosts() {
  const auto ends = run(4, quick_settings(), [](RankContext& me) {
    FaultyStore store(me.store, [&](const std::string&, const std::string& value) {
      PeerInfo it = PeerInfo::decode(value);
      it.host = me.rank == 3 ? "b" : "a", it.boot = it.domain = it.host;
      return it.encode();
    });
    RankContext other{me.rank, me.world, store, me.settings};
    return join_and_exchange(other);
  });
  for (const RankExit& end : ends)
    expect_equal(end.result,
                 "invalid_argument: all ranks of group 'default' must be on one host, because its "
                 "options have hosts='one', but ranks 0-2 are on a, rank 3 is on b: pass "
                 "hosts='exact', or use a pycollect group within each host");
}

void refuses_different_settings() {
  const auto ends = run(3, quick_settings(), [](RankContext& me) {
    if (me.rank == 2) me.settings.buffer_bytes = 8192;
    return join_and_exchange(me);
  });
  for (const RankExit& end : ends) {
    expect(contains(end.result,
                    "invalid_argument: the ranks of group 'default' have different settings"),
           end.result);
    expect(contains(end.result, "buffer_bytes=4096") && contains(end.result, "buffer_bytes=8192"),
           end.result);
  }
}

// Imitates ranks in containers with different networks; isolation_test.cpp has real ones.
void names_unreachable_ranks() {
  const auto elsewhere = [](PeerInfo& it) { it.fd_server = 7, it.network_space = 1; };
  for (const RankExit& end : run(3, quick_settings(), exchange_with_record(0, elsewhere)))
    expect_equal(
        end.result,
        "CollectiveError: the ranks of group 'default' cannot share memory; ranks 1, 2: cannot "
        "reach the Unix socket @pycollect-fd-server-0000000000000007 of the process that offers "
        "the "
        "descriptor, which must be alive and in the same network namespace: Connection refused; "
        "rank 0 is in another network namespace than ranks 1, 2, and all ranks need the same: give "
        "their containers one network (docker run --network=host or --network=container:NAME), or "
        "put them in one container");
}

void names_rank_without_memory() {
  for (const RankExit& end : run(3, quick_settings(), [](RankContext& me) {
         const rlimit least = {64 << 10, 64 << 10};
         if (me.rank == 0) setrlimit(RLIMIT_FSIZE, &least);
         return join_and_exchange(me);
       }))
    expect(contains(end.result,
                    "cannot share memory; rank 0: shared memory of 1 MiB exceeds the limit"),
           end.result);
}

void refuses_other_versions() {
  for (const Rank other : {0, 1}) {
    const auto ends = run(3, quick_settings(), [=](RankContext& me) {
      FaultyStore store(me.store, [&](const std::string&, const std::string& value) {
        return me.rank == other ? "pycollect-1" + value.substr(11) : value;
      });
      RankContext it{me.rank, me.world, store, me.settings};
      return join_and_exchange(it);
    });
    for (const RankExit& end : ends)
      expect(contains(end.result, "must run the same version"), end.result);
  }
}

// Rank 1 maps another segment than the others: every rank reports it.
void verifies_same_memory() {
  const auto ends = run(3, quick_settings(), [](RankContext& me) {
    std::optional<FdServer> fd_server;
    FaultyStore store(me.store, {}, [&](const std::string& key, const std::string& value) {
      if (me.rank != 1 || key != "hello/0") return value;
      PeerInfo it = PeerInfo::decode(value);
      const auto other = Segment::create(1 << 20);
      it.fd_server = fd_server.emplace(UniqueFd(dup(other->descriptor()))).id();
      return it.encode();
    });
    RankContext elsewhere{me.rank, me.world, store, me.settings};
    return join_and_exchange(elsewhere);
  });
  for (const RankExit& end : ends)
    expect(contains(end.result, "mapped different shared memory"), end.result);
}

void leaks_nothing(int cycles) {
  const TemporaryFolder folder;
  const auto ends = run(2, quick_settings(), [&](RankContext& me) {
    int files = 0, threads = 0;
    for (int i = 0; i < cycles; ++i) {
      FileStore store(text(folder.path(), "/", i));
      Group group(store, me.rank, me.world, me.settings);
      if (const std::string message = exchange_rounds(group, 2); message != "right") return message;
      if (i == 2)
        files = count_entries("/proc/self/fd"), threads = count_entries("/proc/self/task");
      if (i > 2 &&
          (count_entries("/proc/self/fd") > files || count_entries("/proc/self/task") > threads))
        return text("grew in cycle ", i);
    }
    return std::string("right");
  });
  for (const RankExit& end : ends) expect_equal(end.result, "right");
}

}  // namespace
}  // namespace pycollect::ipc

int main(int argc, char** argv) {
  using namespace pycollect::ipc;
  const int cycles = argc > 1 ? std::atoi(argv[1]) : 100;
  const std::pair<const char*, std::function<void()>> tests[] = {
      {"ranks exchange", ranks_exchange},
      {"refuses several hosts", refuses_several_hosts},
      {"refuses different settings", refuses_different_settings},
      {"names unreachable ranks", names_unreachable_ranks},
      {"names rank without memory", names_rank_without_memory},
      {"refuses other versions", refuses_other_versions},
      {"verifies same memory", verifies_same_memory},
      {"leaks nothing", [=] { leaks_nothing(cycles); }},
  };
  for (const auto& [name, test] : tests) {
    std::printf("%s\n", name);
    std::fflush(stdout);
    test();
  }
  std::puts("group_test: all good");
}
