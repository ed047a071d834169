// Errors of the rendezvous: a rank is late, dies, fails or is stopped while a group is formed.
#include <signal.h>

#include <random>

#include "group_ranks.h"

namespace pycollect::ipc {
namespace {

void names_missing_ranks() {
  GroupSettings settings = quick_settings();
  settings.timeout = 400ms;
  for (const bool first : {false, true}) {
    const auto ends = run(4, settings, [=](RankContext& me) {
      return me.rank % 2 == 1 || (first && me.rank == 0) ? "absent" : join_and_exchange(me);
    });
    for (Rank r : {0, 2})
      expect_equal(ends[r].result, first && r == 0
                                       ? "absent"
                                       : text("Timeout: group 'default': Timed out after 0.4 s; ",
                                              first ? "rank 0" : "ranks 1, 3", " did not arrive"));
    expect(ends[2].elapsed < 2s, "took too long");
  }
}

// A rank that begins later fails together with the first one, with the same message.
void names_missing_ranks_to_all() {
  GroupSettings settings = quick_settings();
  settings.timeout = 1s;
  const auto ends = run(3, settings, [](RankContext& me) {
    std::this_thread::sleep_for(me.rank * 400ms);
    return me.rank == 1 ? "absent" : join_and_exchange(me);
  });
  for (Rank r : {0, 2})
    expect_equal(ends[r].result,
                 "Timeout: group 'default': Timed out after 1 s; rank 1 did not arrive");
}

// The victim sends itself `signal` before or after it publishes its PeerInfo; the others read
// rank 0's PeerInfo 100 ms late.
Body exchange_with_victim(Rank victim, bool posted, int signal) {
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
    return join_and_exchange(other);
  };
}

// A rank dies during the rendezvous, before or after it has published its PeerInfo: the others fail
// without a timeout.
void detects_deaths_meanwhile() {
  for (const auto& [victim, posted] : {std::pair{1, false}, {1, true}, {0, true}}) {
    const auto ends = run(3, quick_settings(), exchange_with_victim(victim, posted, SIGKILL));
    for (Rank r : {0, 1, 2}) {
      if (r == victim) continue;
      const std::string named = text("rank ", victim, " (pid ");
      expect(ends[r].result.starts_with("PeerLost: ") && contains(ends[r].result, named),
             ends[r].result);
      expect(posted || contains(ends[r].result, ") died before all ranks had joined"),
             ends[r].result);
      expect(ends[r].elapsed < 2s, "took too long");
    }
  }
}

// Rank 1's store fails, but its process lives on: before or after it has published its PeerInfo.
void reports_failures_meanwhile() {
  for (const bool posted : {false, true}) {
    const auto ends = run(3, quick_settings(), [=](RankContext& me) {
      const auto fail = [&](const std::string& key, const std::string& value) {
        if (me.rank == 1 && (!posted || key == "hello/1")) throw std::runtime_error("no store");
        return value;
      };
      FaultyStore store(me.store, posted ? Falsify() : fail, posted ? fail : Falsify());
      RankContext other{me.rank, me.world, store, me.settings};
      const std::string message = attempt([&] { return join_and_exchange(other); });
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
  for (const RankExit& end : run(3, quick_settings(), [](RankContext& me) {
         bool late = me.rank == 2;
         FaultyStore store(me.store, {}, [&](const std::string& key, const std::string& value) {
           if (key == "hello/1" && std::exchange(late, false)) {
             std::this_thread::sleep_for(300ms);
             throw Timeout("a slow store");
           }
           return value;
         });
         Group group(store, me.rank, me.world, me.settings);
         return std::string("right");
       }))
    expect_equal(end.result, "right");
}

// A stopped rank 0 does not answer fetches, and is not dead: the others wait until the timeout.
void waits_for_stopped_rank() {
  GroupSettings settings = quick_settings();
  settings.timeout = 600ms;
  for (const bool goes_on : {false, true}) {
    const TemporaryFolder folder;
    const auto ends = run(3, settings, [&](RankContext& me) {
      if (const pid_t rank = getpid(); me.rank == 0 && fork() == 0) {
        std::this_thread::sleep_for(goes_on ? 300ms : 1500ms);
        kill(rank, goes_on ? SIGCONT : SIGKILL);
        _exit(0);
      }
      return exchange_with_victim(0, true, SIGSTOP)(me);
    });
    for (Rank r : {1, 2})
      expect_equal(ends[r].result, goes_on ? "right"
                                           : "Timeout: group 'default': Timed out after 0.6 s; "
                                             "rank 0 did not arrive");
  }
}

// The others end in time, at whatever moment one rank is killed.
void ends_after_any_kill(int times) {
  std::mt19937 random(1);
  GroupSettings settings = quick_settings();
  settings.timeout = 300ms;
  for (int i = 0; i < times; ++i) {
    const int64_t after = random() % 6000;
    const auto ends = run(3, settings, [&](RankContext& me) {
      if (me.rank == i % 3)
        std::thread([after] {
          std::this_thread::sleep_for(std::chrono::microseconds(after));
          kill(getpid(), SIGKILL);
        }).detach();
      const std::string message = join_and_exchange(me);
      std::this_thread::sleep_for(10ms);
      return message;
    });
    for (Rank r = 0; r < 3; ++r) {
      if (r == i % 3) continue;
      expect(ends[r].elapsed < 2s, "took too long");
      const std::string& message = ends[r].result;
      expect(message == "right" || message.starts_with("PeerLost: ") ||
                 message.starts_with("Timeout: "),
             message);
    }
  }
}

}  // namespace
}  // namespace pycollect::ipc

int main(int argc, char** argv) {
  using namespace pycollect::ipc;
  const int times = argc > 1 ? std::atoi(argv[1]) : 100;
  const std::pair<const char*, std::function<void()>> tests[] = {
      {"names missing ranks", names_missing_ranks},
      {"names missing ranks to all", names_missing_ranks_to_all},
      {"detects deaths meanwhile", detects_deaths_meanwhile},
      {"reports failures meanwhile", reports_failures_meanwhile},
      {"lets ranks leave early", lets_ranks_leave_early},
      {"waits for stopped rank", waits_for_stopped_rank},
      {"ends after any kill", [=] { ends_after_any_kill(times); }},
  };
  for (const auto& [name, test] : tests) {
    std::printf("%s\n", name);
    std::fflush(stdout);
    test();
  }
  std::puts("rendezvous_test: all good");
}
