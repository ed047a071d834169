// Errors of the rendezvous: a rank is late, dies, fails or is stopped while a group is formed.
#include "ranks.h"

namespace pycollect::ipc {
namespace {

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
  pycollect::run_tests({{"names missing ranks", names_missing_ranks},
                        {"detects deaths meanwhile", detects_deaths_meanwhile},
                        {"reports failures meanwhile", reports_failures_meanwhile},
                        {"lets ranks leave early", lets_ranks_leave_early},
                        {"waits for stopped rank", waits_for_stopped_rank}});
}
