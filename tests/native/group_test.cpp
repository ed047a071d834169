// The memory that ranks come to share, the error of every rank when they cannot share any, and that
// a group leaves nothing behind.
#include <sys/resource.h>

#include "../../csrc/bootstrap/fd_server.h"
#include "group_ranks.h"

namespace pycollect::shm {
namespace {

void meets() {
  for (int world : {1, 2, 3, 8})
    for (const RankExit& end : run(world, quick(), meet_and_exchange))
      expect_equal(end.said, "right");
}

// Ranks of which `liar` publishes its bootstrap record with `change` made to it.
Body meets_with(Rank liar, const std::function<void(PeerInfo&)>& change) {
  return [=](RankContext& me) {
    FaultyStore store(me.store, [&](const std::string&, const std::string& value) {
      if (me.rank != liar) return value;
      PeerInfo it = PeerInfo::decode(value);
      change(it);
      return it.encode();
    });
    RankContext other{me.rank, me.world, store, me.settings};
    return meet_and_exchange(other);
  };
}

void refuses_several_hosts() {
  const auto ends = run(4, quick(), [](RankContext& me) {
    FaultyStore store(me.store, [&](const std::string&, const std::string& value) {
      PeerInfo it = PeerInfo::decode(value);
      it.host = me.rank == 3 ? "b" : "a", it.boot = it.host;
      return it.encode();
    });
    RankContext other{me.rank, me.world, store, me.settings};
    return meet_and_exchange(other);
  });
  for (const RankExit& end : ends)
    expect_equal(end.said,
                 "invalid_argument: all ranks of a pycollect group must be on one host; in group "
                 "'default' ranks 0-2 are on a, rank 3 is on b: use gloo (CPU) or nccl (CUDA) "
                 "between hosts, and a pycollect group within each");
}

void refuses_unlike_settings() {
  const auto ends = run(3, quick(), [](RankContext& me) {
    if (me.rank == 2) me.settings.buffer_bytes = 8192;
    return meet_and_exchange(me);
  });
  for (const RankExit& end : ends) {
    expect(contains(end.said,
                    "invalid_argument: the ranks of group 'default' have different settings"),
           end.said);
    expect(contains(end.said, "buffer_bytes=4096") && contains(end.said, "buffer_bytes=8192"),
           end.said);
  }
}

// Imitates ranks in containers with different networks; isolation_test.cpp has real ones.
void names_who_cannot_be_reached() {
  const auto elsewhere = [](PeerInfo& it) { it.ticket.fd_server = 7, it.network_space = 1; };
  for (const RankExit& end : run(3, quick(), meets_with(0, elsewhere)))
    expect_equal(
        end.said,
        "CollectiveError: the ranks of group 'default' cannot share memory; ranks 1, 2: cannot "
        "reach the Unix socket @pycollect-fd-server-0000000000000007 of the process that offers "
        "the "
        "descriptor, which must be alive and in the same network namespace: Connection refused; "
        "rank 0 is in another network namespace than ranks 1, 2, and all ranks need the same: give "
        "their containers one network (docker run --network=host or --network=container:NAME), or "
        "put them in one container");
}

void names_who_can_make_none() {
  for (const RankExit& end : run(3, quick(), [](RankContext& me) {
         const rlimit least = {64 << 10, 64 << 10};
         if (me.rank == 0) setrlimit(RLIMIT_FSIZE, &least);
         return meet_and_exchange(me);
       }))
    expect(contains(end.said, "cannot share memory; rank 0: shared memory of 1 MiB is more than"),
           end.said);
}

void refuses_other_versions() {
  for (const Rank other : {0, 1}) {
    const auto ends = run(3, quick(), [=](RankContext& me) {
      FaultyStore store(me.store, [&](const std::string&, const std::string& value) {
        return me.rank == other ? "pycollect-1" + value.substr(11) : value;
      });
      RankContext it{me.rank, me.world, store, me.settings};
      return meet_and_exchange(it);
    });
    for (const RankExit& end : ends)
      expect(contains(end.said, "must run the same version"), end.said);
  }
}

// Rank 1 opens another segment than the others, for whatever reason: every rank reports it.
void proves_one_memory() {
  const auto ends = run(3, quick(), [](RankContext& me) {
    FdServer fd_server;
    FaultyStore store(me.store, {}, [&](const std::string& key, const std::string& value) {
      if (me.rank != 1 || key != "hello/0") return value;
      PeerInfo it = PeerInfo::decode(value);
      const auto other = Segment::create(1 << 20);
      it.ticket = fd_server.offer(Descriptor(dup(other->descriptor())));
      return it.encode();
    });
    RankContext elsewhere{me.rank, me.world, store, me.settings};
    return meet_and_exchange(elsewhere);
  });
  for (const RankExit& end : ends)
    expect(contains(end.said, "mapped different shared memory"), end.said);
}

void leaves_nothing(int cycles) {
  const TemporaryFolder boards;
  const auto ends = run(2, quick(), [&](RankContext& me) {
    int files = 0, threads = 0;
    for (int i = 0; i < cycles; ++i) {
      FileStore store(text(boards.path(), "/", i));
      Group group(store, me.rank, me.world, me.settings);
      if (const std::string said = publish_and_agree(group, 2); said != "right") return said;
      if (i == 2)
        files = count_entries("/proc/self/fd"), threads = count_entries("/proc/self/task");
      if (i > 2 &&
          (count_entries("/proc/self/fd") > files || count_entries("/proc/self/task") > threads))
        return text("grew in cycle ", i);
    }
    return std::string("right");
  });
  for (const RankExit& end : ends) expect_equal(end.said, "right");
}

}  // namespace
}  // namespace pycollect::shm

int main(int count, char** words) {
  using namespace pycollect::shm;
  const int cycles = count > 1 ? std::atoi(words[1]) : 100;
  const std::pair<const char*, std::function<void()>> tests[] = {
      {"meets", meets},
      {"refuses several hosts", refuses_several_hosts},
      {"refuses unlike settings", refuses_unlike_settings},
      {"names who cannot be reached", names_who_cannot_be_reached},
      {"names who can make none", names_who_can_make_none},
      {"refuses other versions", refuses_other_versions},
      {"proves one memory", proves_one_memory},
      {"leaves nothing", [=] { leaves_nothing(cycles); }},
  };
  for (const auto& [name, test] : tests) {
    std::printf("%s\n", name);
    std::fflush(stdout);
    test();
  }
  std::puts("group_test: all good");
}
