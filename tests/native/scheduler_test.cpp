// Ranks that are threads: turns in order, deadlocks, limits, helpers, and shared loops. Under
// ThreadSanitizer, the state that ranks change in their turns shows that turns do not overlap.
#include "../../csrc/rank_threads/scheduler.h"

#include <chrono>
#include <cstdio>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/plan/error.h"
#include "group_ranks.h"

namespace pycollect::rank_threads {
namespace {

using ipc::expect;
using Program = std::function<void(RankScheduler&, Rank)>;

std::shared_ptr<RankScheduler> new_scheduler(int world, bool parallel = false) {
  return std::make_shared<RankScheduler>(
      world, parallel,
      RankScheduler::RankHooks{[](Rank) {}, [](Rank) {}, [](Rank) { return std::string(); }});
}

// Runs the program as all ranks, and returns the messages of their exceptions.
std::vector<std::string> launch(RankScheduler& scheduler, const Program& program) {
  std::vector<std::string> errors(scheduler.world());
  std::vector<std::thread> threads;
  for (Rank r = 0; r < scheduler.world(); ++r)
    threads.emplace_back([&, r] {
      scheduler.enter(r);
      try {
        program(scheduler, r);
      } catch (const std::exception& error) {
        errors[r] = error.what();
      }
      scheduler.leave();
    });
  for (std::thread& thread : threads) thread.join();
  return errors;
}

ReadyCondition condition(std::function<bool()> ready) {
  return {std::move(ready), [] { return "a condition"; }};
}

// A barrier whose state is guarded by the scheduler's mutex.
struct Barrier {
  int arrived = 0, passed = 0;
  void wait(RankScheduler& scheduler, Rank r) {
    int mine;
    {
      const std::lock_guard lock(scheduler.mutex());
      mine = arrived++ / scheduler.world();
      passed = arrived / scheduler.world();
      scheduler.notify();
    }
    scheduler.wait(r, condition([this, mine] { return passed > mine; }));
  }
};

void ranks_take_turns_in_order() {
  constexpr int kWorld = 4, kRounds = 200;
  const auto scheduler = new_scheduler(kWorld);
  std::vector<Rank> order;  // changed by ranks in their turns, without a lock
  Barrier barrier;
  const auto errors = launch(*scheduler, [&](RankScheduler& s, Rank r) {
    for (int i = 0; i < kRounds; ++i) {
      order.push_back(r);
      barrier.wait(s, r);
      s.yield_in_order(r);
    }
  });
  for (const std::string& error : errors) expect(error.empty(), error.c_str());
  expect(order.size() == kWorld * kRounds, "a rank has missed a turn");
  for (Rank r = 0; r < kWorld; ++r) expect(order[r] == r, "the ranks do not begin in their order");
}

void parallel_ranks_meet() {
  const auto scheduler = new_scheduler(4, true);
  Barrier barrier;
  std::atomic<int> sum{0};
  launch(*scheduler, [&](RankScheduler& s, Rank r) {
    for (int i = 0; i < 200; ++i) {
      sum += r;
      barrier.wait(s, r);
    }
  });
  expect(sum == 200 * 6, "a parallel rank has left early");
}

void a_deadlock_reaches_every_rank(bool parallel) {
  const auto scheduler = new_scheduler(3, parallel);
  const auto errors = launch(*scheduler, [](RankScheduler& s, Rank r) {
    if (r != 1) s.wait(r, condition([] { return false; }));
  });
  expect(errors[0].find("deadlock") != std::string::npos, "no deadlock was found");
  expect(errors[0].find("rank 1 has ended") != std::string::npos, "the ended rank is not named");
  expect(errors[1].empty() && errors[2] == errors[0], "the ranks have other errors");
}

void a_limit_ends_before_a_deadlock() {
  const auto scheduler = new_scheduler(2);
  bool written = false;
  const auto errors = launch(*scheduler, [&](RankScheduler& s, Rank r) {
    ReadyCondition wait = condition([&] { return written; });
    if (r == 1) return void(s.wait(r, wait));
    wait.deadline = Clock::now() + std::chrono::hours(1);
    wait.is_limited = true;
    expect(!s.wait(r, wait), "the limit was not over");
    const std::lock_guard lock(s.mutex());
    written = true;
    s.notify();
  });
  expect(errors[0].empty() && errors[1].empty(), "a limited wait became a deadlock");
}

// A thread that no rank has started may do what the ranks wait for, until it ends.
void a_stranger_counts_until_it_ends(bool acts) {
  const auto scheduler = new_scheduler(2);
  bool written = false;
  std::atomic<bool> known = false;  // the scheduler has seen the thread
  std::thread stranger([&] {
    ReadyCondition wait = condition([&] { return known = true, written; });
    wait.deadline = Clock::now() + std::chrono::hours(1);
    wait.is_limited = true;
    expect(!scheduler->wait(1, wait), "the limit was not over");
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    if (!acts) return;
    const std::lock_guard lock(scheduler->mutex());
    written = true;
    scheduler->notify();
  });
  while (!known) std::this_thread::yield();
  const auto errors = launch(
      *scheduler, [&](RankScheduler& s, Rank r) { s.wait(r, condition([&] { return written; })); });
  stranger.join();
  for (const std::string& error : errors)
    expect(error.empty() == acts, acts ? error : "the ranks did not see that the thread has ended");
}

// A rank waits for its own thread, which waits for the other rank, in a way that the scheduler does
// not know.
void a_blocked_rank_loses_its_turn() {
  const auto scheduler = new_scheduler(2);
  bool written = false;
  const auto errors = launch(*scheduler, [&](RankScheduler& s, Rank r) {
    if (r == 1) {
      const std::lock_guard lock(s.mutex());
      written = true;
      return s.notify();
    }
    std::thread([&] {
      s.enter_helper(0);
      s.wait(0, condition([&] { return written; }));
      s.leave_helper();
    }).join();
    s.require_turn(0, "the end");
  });
  expect(errors[0].empty() && errors[1].empty(), "a blocked rank has kept its turn");
}

void an_abort_ends_all_waits() {
  const auto scheduler = new_scheduler(3);
  const auto errors = launch(*scheduler, [](RankScheduler& s, Rank r) {
    if (r == 2) return s.abort(EndKind::timed_out, "the time is over");
    s.wait(r, condition([] { return false; }));
  });
  expect(errors[0] == "a condition: the time is over" && errors[1] == errors[0],
         "a wait has not thrown the cause of the abort");
}

void loops_are_shared_once() {
  WorkShare share;
  std::atomic<bool> ended{false};
  std::vector<std::thread> helpers;
  for (int i = 0; i < 3; ++i)
    helpers.emplace_back([&] {
      share.count_awake(1);
      while (!ended) share.help();
      share.count_awake(-1);
    });
  std::vector<int> counts(1000);
  int shared = 0;
  for (int i = 0; i < 300; ++i)
    shared += share.try_run(1000, 7, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) ++counts[k];
    });
  ended = true;
  for (std::thread& helper : helpers) helper.join();
  for (const int count : counts) expect(count == shared, "an element was visited too often or not");
}

}  // namespace
}  // namespace pycollect::rank_threads

int main() {
  using namespace pycollect::rank_threads;
  ranks_take_turns_in_order();
  parallel_ranks_meet();
  a_deadlock_reaches_every_rank(false);
  a_deadlock_reaches_every_rank(true);
  a_limit_ends_before_a_deadlock();
  a_stranger_counts_until_it_ends(true);
  a_stranger_counts_until_it_ends(false);
  a_blocked_rank_loses_its_turn();
  an_abort_ends_all_waits();
  loops_are_shared_once();
  std::puts("scheduler_test: all good");
}
