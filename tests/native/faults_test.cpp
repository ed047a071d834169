// Errors of waiting ranks when a peer dies, leaves, stops or is late: thrown within a second, with
// the same message on every rank, in every stage of waiting.
#include <signal.h>

#include "group_ranks.h"

namespace pycollect::ipc {
namespace {

const uint64_t kGoal = at_run(5) + 1;

// Rank 1 of three dies when the others have waited for `after`; its own child process lives on. The
// others wait for a counter, or for a condition.
void expect_detected(std::chrono::microseconds after, bool by_counter) {
  const TemporaryFolder folder;
  const auto ends = run(3, quick_settings(), [&](RankContext& me) {
    Group group(me.store, me.rank, me.world, me.settings);
    group.advance(at_run(5));
    for (Rank r = 0; r < 3; ++r) group.await(r, at_run(5), me.context(10s));
    const auto begin = Clock::now();
    if (me.rank == 1) {
      if (fork() == 0) {
        std::this_thread::sleep_for(3s);
        _exit(0);
      }
      while (Clock::now() - begin < after) pause();
      kill(getpid(), SIGKILL);
    }
    const std::string message = attempt([&] {
      if (by_counter) {
        group.await(me.rank == 0 ? 1 : 0, kGoal, me.context(10s));
      } else {
        group.await([] { return false; }, {.missing = [] { return std::vector<Rank>{1}; }},
                    me.context(10s));
      }
      return std::string("nothing");
    });
    const double waited = std::chrono::duration<double>(Clock::now() - begin - after).count();
    expect(waited < 1, text("detected after ", waited, " s"));
    const std::string again = attempt([&] {
      group.require_healthy({"broadcast", 18, Clock::now()});
      return "healthy";
    });
    expect(contains(again, "broadcast #18 of group 'default': broken since all_reduce #17: rank 1"),
           again);
    return message;
  });
  expect(ends[1].killed, "rank 1 was not killed");
  expect(contains(ends[0].result, "PeerLost: all_reduce #17 of group 'default': rank 1 (pid "),
         ends[0].result);
  expect(contains(ends[0].result, ") died; ranks 0, 2 are alive"), ends[0].result);
  expect_equal(ends[2].result, ends[0].result);
}

void detects_deaths() {
  for (auto after : {10us, 1000us, 300'000us})
    for (bool by_counter : {true, false}) expect_detected(after, by_counter);
}

void names_late_ranks() {
  GroupSettings settings = quick_settings();
  const auto ends = run(4, settings, [](RankContext& me) {
    Group group(me.store, me.rank, me.world, me.settings);
    const OpContext now = me.context(300ms);
    if (me.rank % 2 == 1) {
      std::this_thread::sleep_for(700ms);
      return attempt([&] {
        group.require_healthy({"all_reduce", 17, now.deadline});
        return "healthy";
      });
    }
    group.advance(kGoal);
    return attempt([&] {
      for (Rank r = 0; r < 4; ++r) group.await(r, kGoal, now);
      return "nothing";
    });
  });
  for (const RankExit& end : ends)
    expect_equal(
        end.result,
        "Timeout: all_reduce #17 of group 'default': Timed out after 0.3 s; ranks 1, 3 did "
        "not arrive");
}

// The awaited rank is itself waiting: the error names the rank that is behind all others.
void names_slowest_rank() {
  const auto ends = run(3, quick_settings(), [](RankContext& me) {
    Group group(me.store, me.rank, me.world, me.settings);
    const OpContext now = me.context(300ms);
    if (me.rank == 2)
      std::this_thread::sleep_for(700ms);
    else
      group.advance(kGoal + me.rank);
    return attempt([&] {
      group.await((me.rank + 1) % 3, kGoal + 5, now);
      return "nothing";
    });
  });
  expect(contains(ends[0].result, "; rank 2 did not arrive"), ends[0].result);
  expect_equal(ends[1].result, ends[0].result);
}

void names_departed_rank() {
  const auto ends = run(3, quick_settings(), [](RankContext& me) {
    Group group(me.store, me.rank, me.world, me.settings);
    group.advance(me.rank == 2 ? at_run(6) : kGoal);
    if (me.rank == 2) return std::string("finished before");
    if (me.rank == 1)
      return attempt([&] {
        group.await(2, kGoal, me.context(5s));
        return "arrived";
      });
    std::this_thread::sleep_for(100ms);  // rank 2 leaves, but has finished its run
    return attempt([&] {
      group.await(1, at_run(6), me.context(5s));
      return "nothing";
    });
  });
  expect_equal(ends[0].result,
               "PeerLost: all_reduce #17 of group 'default': rank 1 has left the group");
  expect_equal(ends[1].result, "arrived");
}

void waits_for_stopped_rank() {
  const auto ends = run(2, quick_settings(), [](RankContext& me) {
    Group group(me.store, me.rank, me.world, me.settings);
    if (me.rank == 1) {
      if (const pid_t parent = getpid(); fork() == 0) {
        std::this_thread::sleep_for(1500ms);
        kill(parent, SIGCONT);
        _exit(0);
      }
      kill(getpid(), SIGSTOP);
      group.advance(kGoal);
      return std::string("arrived");
    }
    return attempt([&] {
      group.await(1, kGoal, me.context(10s));
      return "arrived";
    });
  });
  for (const RankExit& end : ends) expect_equal(end.result, "arrived");
  expect(ends[0].elapsed > 1400ms, "was not stopped");
}

void aborts() {
  const auto ends = run(3, quick_settings(), [](RankContext& me) {
    Group group(me.store, me.rank, me.world, me.settings);
    std::jthread other([&] {
      std::this_thread::sleep_for(200ms);
      if (me.rank == 2) group.abort("enough");
    });
    return attempt([&] {
      group.await((me.rank + 1) % 3, kGoal, me.context(10s));
      return "nothing";
    });
  });
  for (const RankExit& end : ends) {
    expect_equal(end.result,
                 "PeerLost: all_reduce #17 of group 'default': rank 2 aborted the group: enough");
    expect(end.elapsed < 1s, "took too long");
  }
}

// A forked child of a rank, such as a data loader's, can neither use the group nor abort it.
void rejects_forked_children() {
  const auto ends = run(2, quick_settings(), [](RankContext& me) {
    auto group = std::make_unique<Group>(me.store, me.rank, me.world, me.settings);
    const TemporaryFolder folder;
    const pid_t child = fork();
    if (child == 0) {
      const std::string message = attempt([&] {
        group->require_healthy(me.context(1s));
        return "healthy";
      });
      group->abort("not mine");
      group.reset();
      _exit(contains(message, "forked child of rank") ? 7 : 8);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (WEXITSTATUS(status) != 7) return std::string("the child was accepted as a rank");
    group->advance(kGoal);
    return attempt([&] {
      group->await(1 - me.rank, kGoal, me.context(5s));
      group->require_healthy(me.context(1s));
      return "healthy";
    });
  });
  for (const RankExit& end : ends) expect_equal(end.result, "healthy");
}

// Ranks that are threads in one mapping, where a sanitizer sees their accesses.
void works_between_threads() {
  constexpr int kWorld = 3;
  GroupSettings settings = quick_settings();
  settings.segment = Segment::create(SegmentLayout({kWorld, settings.buffer_bytes, 0, 0}).total);
  MapStore store;
  std::vector<std::jthread> team;
  for (Rank me = 0; me < kWorld; ++me)
    team.emplace_back([&, me] {
      Group group(store, me, kWorld, settings);
      for (uint64_t i = 1; i < 300; ++i) {
        const OpContext now{"exchange", i, Clock::now() + 30s};
        for (Rank r = 0; r < kWorld; ++r) group.await(r, at_run(i - 1), now);
        *reinterpret_cast<uint64_t*>(group.staging_buffer(me, i)) = i;
        if (static_cast<Rank>(i % 50) == me)
          std::this_thread::sleep_for(5ms);  // the others go through all stages of waiting
        group.advance(at_run(i) + 1);
        for (Rank r = 0; r < kWorld; ++r) {
          group.await(r, at_run(i) + 1, now);
          expect(*reinterpret_cast<uint64_t*>(group.staging_buffer(r, i)) == i, "wrong");
        }
        group.advance(at_run(i + 1));
      }
      std::jthread other([&] {
        if (me == 1) group.abort("the end");
      });
      const std::string message = attempt([&] {
        group.await((me + 1) % kWorld, at_run(400), {"exchange", 400, Clock::now() + 30s});
        return "nothing";
      });
      expect(contains(message, "rank 1 aborted the group: the end"), message);
    });
}

}  // namespace
}  // namespace pycollect::ipc

// Usage: faults_test [number of tests]. One is enough for a sanitizer, which sees one process only.
int main(int argc, char** argv) {
  using namespace pycollect::ipc;
  int remaining = argc > 1 ? std::atoi(argv[1]) : 1000;
  const std::pair<const char*, void (*)()> tests[] = {
      {"works between threads", works_between_threads},
      {"detects deaths", detects_deaths},
      {"names late ranks", names_late_ranks},
      {"names slowest rank", names_slowest_rank},
      {"names departed rank", names_departed_rank},
      {"waits for stopped rank", waits_for_stopped_rank},
      {"aborts", aborts},
      {"rejects forked children", rejects_forked_children},
  };
  for (const auto& [name, test] : tests) {
    if (remaining-- == 0) break;
    std::printf("%s\n", name);
    std::fflush(stdout);
    test();
  }
  std::puts("faults_test: all good");
}
