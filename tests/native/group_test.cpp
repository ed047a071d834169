// How ranks come to share memory, who is told what when it does not work, and that nothing is left
// of it.
#include <signal.h>
#include <sys/resource.h>

#include <random>

#include "../../csrc/shm/outlet.h"
#include "group_ranks.h"

namespace pycollect::shm {
namespace {

// What each rank wrote into its slots is read by all, for many turns.
std::string exchange(Group& g, int turns) {
  for (int i = 1; i <= turns; ++i) {
    const Occasion now{"exchange", static_cast<uint64_t>(i), Clock::now() + 30s};
    for (Rank r = 0; r < g.world(); ++r) g.await(r, at_run(i - 1), now);
    auto* mine = reinterpret_cast<uint64_t*>(g.slot(g.rank(), i));
    mine[0] = mine[511] = 1000 * i + g.rank();
    g.advance(at_run(i) + 1);
    for (Rank r = 0; r < g.world(); ++r) {
      g.await(r, at_run(i) + 1, now);
      const auto* its = reinterpret_cast<const uint64_t*>(g.slot(r, i));
      const uint64_t wanted = 1000 * i + r;
      if (its[0] != wanted || its[511] != wanted) return text("wrong in turn ", i);
    }
    g.advance(at_run(i + 1));
  }
  return "right";
}

std::string meet_and_exchange(Me& me) {
  Group group(me.board, me.rank, me.world, me.settings);
  return exchange(group, 50);
}

void meets() {
  for (int world : {1, 2, 3, 8})
    for (const End& end : run(world, quick(), meet_and_exchange)) expect_equal(end.said, "right");
}

void names_who_does_not_come() {
  Settings settings = quick();
  settings.timeout = 400ms;
  for (const bool first : {false, true}) {
    const auto ends = run(4, settings, [=](Me& me) {
      return me.rank % 2 == 1 || (first && me.rank == 0) ? "absent" : meet_and_exchange(me);
    });
    for (Rank r : {0, 2})
      expect_equal(ends[r].said, first && r == 0
                                     ? "absent"
                                     : text("Timeout: group 'default': timed out after 0.4 s; ",
                                            first ? "rank 0" : "ranks 1, 3", " did not arrive"));
    expect(ends[2].when < 2s, "took too long");
  }
}

// What a rank does when it is about to post its introduction, or has posted it; the others hear of
// rank 0's a little later.
Body meets_until(Rank victim, bool posted, int signal) {
  return [=](Me& me) {
    LyingBoard board(
        me.board,
        [&](const std::string& key, const std::string& value) {
          if (me.rank != victim) return value;
          if (posted) me.board.post(key, value);
          kill(getpid(), signal);
          return value;
        },
        [&](const std::string& key, const std::string& value) {
          if (key == "hello/0") std::this_thread::sleep_for(100ms);
          return value;
        });
    Me other{me.rank, me.world, board, me.settings};
    return meet_and_exchange(other);
  };
}

// With the memory or without: the others need not wait for the time limit.
void notices_who_dies_there() {
  for (const auto& [victim, posted] : {std::pair{1, false}, {1, true}, {0, true}}) {
    const auto ends = run(3, quick(), meets_until(victim, posted, SIGKILL));
    for (Rank r : {0, 1, 2}) {
      if (r == victim) continue;
      const std::string whose = text("rank ", victim, " (pid ");
      expect(ends[r].said.starts_with("PeerLost: ") && contains(ends[r].said, whose), ends[r].said);
      expect(posted || contains(ends[r].said, ") died before all had come"), ends[r].said);
      expect(ends[r].when < 2s, "took too long");
    }
  }
}

// It cannot hand over the memory, and is not dead.
void waits_for_who_is_stopped_there() {
  Settings settings = quick();
  settings.timeout = 600ms;
  for (const bool goes_on : {false, true}) {
    const Folder folder;
    const auto ends = run(3, settings, [&](Me& me) {
      if (const pid_t rank = getpid(); me.rank == 0 && fork() == 0) {
        std::this_thread::sleep_for(goes_on ? 300ms : 1500ms);
        kill(rank, goes_on ? SIGCONT : SIGKILL);
        _exit(0);
      }
      return meets_until(0, true, SIGSTOP)(me);
    });
    for (Rank r : {1, 2})
      expect_equal(ends[r].said, goes_on ? "right"
                                         : "Timeout: group 'default': timed out after 0.6 s; "
                                           "rank 0 did not arrive");
  }
}

// As rank `liar` would say it with `change` made to the truth.
Body meets_with(Rank liar, const std::function<void(Introduction&)>& change) {
  return [=](Me& me) {
    LyingBoard board(me.board, [&](const std::string&, const std::string& value) {
      if (me.rank != liar) return value;
      Introduction it = Introduction::decode(value);
      change(it);
      return it.encode();
    });
    Me other{me.rank, me.world, board, me.settings};
    return meet_and_exchange(other);
  };
}

void refuses_several_hosts() {
  const auto ends = run(4, quick(), [](Me& me) {
    LyingBoard board(me.board, [&](const std::string&, const std::string& value) {
      Introduction it = Introduction::decode(value);
      it.host = me.rank == 3 ? "b" : "a", it.boot = it.host;
      return it.encode();
    });
    Me other{me.rank, me.world, board, me.settings};
    return meet_and_exchange(other);
  });
  for (const End& end : ends)
    expect_equal(end.said,
                 "invalid_argument: a pycollect group is of one host; in group 'default' ranks 0-2 "
                 "are on a, rank 3 is on b: use gloo (CPU) or nccl (CUDA) between hosts, and a "
                 "pycollect group within each");
}

void refuses_unlike_settings() {
  const auto ends = run(3, quick(), [](Me& me) {
    if (me.rank == 2) me.settings.slot_bytes = 8192;
    return meet_and_exchange(me);
  });
  for (const End& end : ends) {
    expect(contains(end.said, "invalid_argument: the ranks of group 'default' want different ones"),
           end.said);
    expect(contains(end.said, "slot_bytes=4096") && contains(end.said, "slot_bytes=8192"),
           end.said);
  }
}

// As ranks hear of it whose containers have unlike networks; apart_test has such.
void names_who_cannot_be_reached() {
  const auto elsewhere = [](Introduction& it) { it.ticket.outlet = 7, it.network_space = 1; };
  for (const End& end : run(3, quick(), meets_with(0, elsewhere)))
    expect_equal(
        end.said,
        "CollectiveError: the ranks of group 'default' cannot share memory; ranks 1, 2: cannot "
        "reach the Unix socket @pycollect-outlet-0000000000000007 of the process that offers it, "
        "which must be alive and in the same network namespace: Connection refused; rank 0 is in "
        "another network namespace than ranks 1, 2, and all ranks need the same: give their "
        "containers one network (docker run --network=host or --network=container:NAME), or put "
        "them in one container");
}

void names_who_can_make_none() {
  for (const End& end : run(3, quick(), [](Me& me) {
         const rlimit least = {64 << 10, 64 << 10};
         if (me.rank == 0) setrlimit(RLIMIT_FSIZE, &least);
         return meet_and_exchange(me);
       }))
    expect(contains(end.said, "cannot share memory; rank 0: shared memory of 1 MiB is more than"),
           end.said);
}

void refuses_other_versions() {
  for (const Rank other : {0, 1}) {
    const auto ends = run(3, quick(), [=](Me& me) {
      LyingBoard board(me.board, [&](const std::string&, const std::string& value) {
        return me.rank == other ? "pycollect-1" + value.substr(11) : value;
      });
      Me it{me.rank, me.world, board, me.settings};
      return meet_and_exchange(it);
    });
    for (const End& end : ends) expect(contains(end.said, "must run the same version"), end.said);
  }
}

// However rank 1 came by it.
void proves_one_memory() {
  const auto ends = run(3, quick(), [](Me& me) {
    Outlet outlet;
    LyingBoard board(me.board, {}, [&](const std::string& key, const std::string& value) {
      if (me.rank != 1 || key != "hello/0") return value;
      Introduction it = Introduction::decode(value);
      const auto other = Segment::create(1 << 20);
      it.ticket = outlet.offer(Descriptor(dup(other->descriptor())));
      return it.encode();
    });
    Me elsewhere{me.rank, me.world, board, me.settings};
    return meet_and_exchange(elsewhere);
  });
  for (const End& end : ends) expect(contains(end.said, "were handed different memory"), end.said);
}

void leaves_nothing(int cycles) {
  const Folder boards;
  const auto ends = run(2, quick(), [&](Me& me) {
    int files = 0, threads = 0;
    for (int i = 0; i < cycles; ++i) {
      FolderBoard board(text(boards.path(), "/", i));
      Group group(board, me.rank, me.world, me.settings);
      if (const std::string said = exchange(group, 2); said != "right") return said;
      if (i == 2)
        files = count_entries("/proc/self/fd"), threads = count_entries("/proc/self/task");
      if (i > 2 &&
          (count_entries("/proc/self/fd") > files || count_entries("/proc/self/task") > threads))
        return text("grew in cycle ", i);
    }
    return std::string("right");
  });
  for (const End& end : ends) expect_equal(end.said, "right");
}

// Whenever one is killed, the others end in time.
void ends_whoever_is_killed_when(int times) {
  std::mt19937 random(1);
  Settings settings = quick();
  settings.timeout = 300ms;
  for (int i = 0; i < times; ++i) {
    const int64_t after = random() % 6000;
    const auto ends = run(3, settings, [&](Me& me) {
      if (me.rank == i % 3)
        std::thread([after] {
          std::this_thread::sleep_for(std::chrono::microseconds(after));
          kill(getpid(), SIGKILL);
        }).detach();
      const std::string said = meet_and_exchange(me);
      std::this_thread::sleep_for(10ms);
      return said;
    });
    for (Rank r = 0; r < 3; ++r) {
      if (r == i % 3) continue;
      expect(ends[r].when < 2s, "took too long");
      const std::string& said = ends[r].said;
      expect(said == "right" || said.starts_with("PeerLost: ") || said.starts_with("Timeout: "),
             said);
    }
  }
}

}  // namespace
}  // namespace pycollect::shm

int main(int count, char** words) {
  using namespace pycollect::shm;
  const int cycles = count > 1 ? std::atoi(words[1]) : 100;
  const std::pair<const char*, std::function<void()>> tests[] = {
      {"meets", meets},
      {"names who does not come", names_who_does_not_come},
      {"notices who dies there", notices_who_dies_there},
      {"waits for who is stopped there", waits_for_who_is_stopped_there},
      {"refuses several hosts", refuses_several_hosts},
      {"refuses unlike settings", refuses_unlike_settings},
      {"names who cannot be reached", names_who_cannot_be_reached},
      {"names who can make none", names_who_can_make_none},
      {"refuses other versions", refuses_other_versions},
      {"proves one memory", proves_one_memory},
      {"leaves nothing", [=] { leaves_nothing(cycles); }},
      {"ends whoever is killed when", [=] { ends_whoever_is_killed_when(cycles); }},
  };
  for (const auto& [name, test] : tests) {
    std::printf("%s\n", name);
    std::fflush(stdout);
    test();
  }
  std::puts("group_test: all good");
}
