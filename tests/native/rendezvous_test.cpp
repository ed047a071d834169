// Errors of the rendezvous: a rank is late, dies, gives up or is stopped while a group is formed.
#include <signal.h>

#include <random>

#include "group_ranks.h"

namespace pycollect::shm {
namespace {

void names_who_does_not_come() {
  Settings settings = quick();
  settings.timeout = 400ms;
  for (const bool first : {false, true}) {
    const auto ends = run(4, settings, [=](RankContext& me) {
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

// A rank that begins later fails together with the first one, with the same message.
void names_who_does_not_come_to_all_at_once() {
  Settings settings = quick();
  settings.timeout = 1s;
  const auto ends = run(3, settings, [](RankContext& me) {
    std::this_thread::sleep_for(me.rank * 400ms);
    return me.rank == 1 ? "absent" : meet_and_exchange(me);
  });
  for (Rank r : {0, 2})
    expect_equal(ends[r].said,
                 "Timeout: group 'default': timed out after 1 s; rank 1 did not arrive");
}

// The victim sends itself `signal` before or after it publishes its bootstrap record; the others
// read rank 0's record 100 ms late.
Body meets_until(Rank victim, bool posted, int signal) {
  return [=](RankContext& me) {
    FaultyStore store(
        me.store,
        [&](const std::string& key, const std::string& value) {
          if (me.rank != victim) return value;
          if (posted) me.store.post(key, value);
          kill(getpid(), signal);
          return value;
        },
        [&](const std::string& key, const std::string& value) {
          if (key == "hello/0") std::this_thread::sleep_for(100ms);
          return value;
        });
    RankContext other{me.rank, me.world, store, me.settings};
    return meet_and_exchange(other);
  };
}

// A rank dies during the rendezvous, with the memory or without: the others fail without a timeout.
void notices_who_dies_there() {
  for (const auto& [victim, posted] : {std::pair{1, false}, {1, true}, {0, true}}) {
    const auto ends = run(3, quick(), meets_until(victim, posted, SIGKILL));
    for (Rank r : {0, 1, 2}) {
      if (r == victim) continue;
      const std::string whose = text("rank ", victim, " (pid ");
      expect(ends[r].said.starts_with("PeerLost: ") && contains(ends[r].said, whose), ends[r].said);
      expect(posted || contains(ends[r].said, ") died before all ranks had joined"), ends[r].said);
      expect(ends[r].when < 2s, "took too long");
    }
  }
}

// Rank 1's store fails, and its process lives on: before its record is published, or after that.
void notices_who_gives_up_there() {
  for (const bool posted : {false, true}) {
    const auto ends = run(3, quick(), [=](RankContext& me) {
      const auto fail = [&](const std::string& key, const std::string& value) {
        if (me.rank == 1 && (!posted || key == "hello/1")) throw std::runtime_error("no board");
        return value;
      };
      FaultyStore store(me.store, posted ? Falsify() : fail, posted ? fail : Falsify());
      RankContext other{me.rank, me.world, store, me.settings};
      const std::string said = attempt([&] { return meet_and_exchange(other); });
      if (me.rank == 1) std::this_thread::sleep_for(3s);
      return said;
    });
    expect_equal(ends[1].said, "exception: no board");
    for (Rank r : {0, 2}) {
      expect_equal(ends[r].said, text("PeerLost: ", posted ? "exchange #1 of " : "",
                                      "group 'default': rank 1 gave up: no board"));
      expect(ends[r].when < 2s, "took too long");
    }
  }
}

// A rank that has read all records may leave before another rank has read its record.
void lets_go_who_has_met_all() {
  for (const RankExit& end : run(3, quick(), [](RankContext& me) {
         bool late = me.rank == 2;
         FaultyStore store(me.store, {}, [&](const std::string& key, const std::string& value) {
           if (key == "hello/1" && std::exchange(late, false)) {
             std::this_thread::sleep_for(300ms);
             throw Timeout("a slow board");
           }
           return value;
         });
         Group group(store, me.rank, me.world, me.settings);
         return std::string("right");
       }))
    expect_equal(end.said, "right");
}

// A stopped rank 0 cannot hand over the memory, and is not dead: the others wait until the timeout.
void waits_for_who_is_stopped_there() {
  Settings settings = quick();
  settings.timeout = 600ms;
  for (const bool goes_on : {false, true}) {
    const TemporaryFolder folder;
    const auto ends = run(3, settings, [&](RankContext& me) {
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

// The others end in time, at whatever moment one rank is killed.
void ends_whoever_is_killed_when(int times) {
  std::mt19937 random(1);
  Settings settings = quick();
  settings.timeout = 300ms;
  for (int i = 0; i < times; ++i) {
    const int64_t after = random() % 6000;
    const auto ends = run(3, settings, [&](RankContext& me) {
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
  const int times = count > 1 ? std::atoi(words[1]) : 100;
  const std::pair<const char*, std::function<void()>> tests[] = {
      {"names who does not come", names_who_does_not_come},
      {"names who does not come to all at once", names_who_does_not_come_to_all_at_once},
      {"notices who dies there", notices_who_dies_there},
      {"notices who gives up there", notices_who_gives_up_there},
      {"lets go who has met all", lets_go_who_has_met_all},
      {"waits for who is stopped there", waits_for_who_is_stopped_there},
      {"ends whoever is killed when", [=] { ends_whoever_is_killed_when(times); }},
  };
  for (const auto& [name, test] : tests) {
    std::printf("%s\n", name);
    std::fflush(stdout);
    test();
  }
  std::puts("rendezvous_test: all good");
}
