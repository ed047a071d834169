// Ranks that are threads: turns in order, deadlocks, limits, helpers, and shared loops. Under
// ThreadSanitizer, the state that ranks change in their turns shows that turns do not overlap.
#include "../../csrc/rank_threads/scheduler.h"

#include <thread>
#include <vector>

#include "../../csrc/plan/error.h"
#include "expect.h"

namespace pycollect::rank_threads {
namespace {

using namespace std::chrono_literals;
using Program = std::function<void(RankScheduler&, Rank)>;
using Errors = std::vector<std::string>;

std::shared_ptr<RankScheduler> new_scheduler(int world, bool parallel = false) {
  return std::make_shared<RankScheduler>(
      world, parallel,
      RankScheduler::RankHooks{[](Rank) {}, [](Rank) {}, [](Rank) { return std::string(); }});
}

// Runs the program as all ranks, and returns the messages of their exceptions.
Errors launch(RankScheduler& scheduler, const Program& program) {
  Errors errors(scheduler.world());
  std::vector<std::jthread> threads;
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
  threads.clear();
  return errors;
}

ReadyCondition condition(std::function<bool()> ready) {
  return {std::move(ready), [] { return "a condition"; }};
}

// A flag that ranks wait for.
struct Flag {
  bool written = false;
  void write(RankScheduler& scheduler) {
    const std::lock_guard lock(scheduler.mutex());
    written = true;
    scheduler.notify();
  }
  ReadyCondition wanted() {
    return condition([this] { return written; });
  }
};

// Ranks meet in each round. In turns, they change `order` without a lock.
void ranks_meet(bool parallel) {
  constexpr int kWorld = 4, kRounds = 200;
  const auto scheduler = new_scheduler(kWorld, parallel);
  std::vector<Rank> order;
  int arrived = 0;
  const Errors errors = launch(*scheduler, [&](RankScheduler& s, Rank r) {
    for (int i = 1; i <= kRounds; ++i) {
      if (!parallel) order.push_back(r);
      {
        const std::lock_guard lock(s.mutex());
        expect(++arrived <= kWorld * i, "a rank has not waited for the others");
        s.notify();
      }
      s.wait(r, condition([&] { return arrived >= kWorld * i; }));
      s.yield_in_order(r);
    }
  });
  expect(errors == Errors(kWorld) && arrived == kWorld * kRounds, "a rank has ended early");
  for (std::size_t i = 0; i < order.size(); ++i)
    expect(order[i] == static_cast<Rank>(i % kWorld), "the turns are not in the order of ranks");
}

void a_deadlock_reaches_every_rank(bool parallel) {
  const auto scheduler = new_scheduler(3, parallel);
  const Errors errors = launch(*scheduler, [](RankScheduler& s, Rank r) {
    if (r != 1) s.wait(r, condition([] { return false; }));
  });
  expect_part(errors[0], "deadlock");
  expect_part(errors[0], "rank 1 has ended");
  expect(errors[1].empty() && errors[2] == errors[0], "the ranks have other errors");
}

// A thread that no rank has started may do what the ranks wait for, until it ends.
void a_stranger_counts_until_it_ends(bool acts) {
  const auto scheduler = new_scheduler(2);
  Flag flag;
  std::atomic<bool> known = false;  // the scheduler has seen the thread
  std::jthread stranger([&] {
    // A limit of an hour, which counts as over when no rank can continue.
    ReadyCondition limited = condition([&] { return known = true, flag.written; });
    limited.deadline = Clock::now() + 1h, limited.is_limited = true;
    expect(!scheduler->wait(1, limited), "the limit was not over");
    std::this_thread::sleep_for(50ms);
    if (acts) flag.write(*scheduler);
  });
  while (!known) std::this_thread::yield();
  const Errors errors =
      launch(*scheduler, [&](RankScheduler& s, Rank r) { s.wait(r, flag.wanted()); });
  for (const std::string& error : errors)
    expect(error.empty() == acts, acts ? error : "the ranks did not see that the thread has ended");
}

// A rank waits for its own thread, which waits for the other rank, in a way that the scheduler does
// not know.
void a_blocked_rank_loses_its_turn() {
  const auto scheduler = new_scheduler(2);
  Flag flag;
  const Errors errors = launch(*scheduler, [&](RankScheduler& s, Rank r) {
    if (r == 1) return flag.write(s);
    std::thread([&] {
      s.enter_helper(0);
      s.wait(0, flag.wanted());
      s.leave_helper();
    }).join();
    s.require_turn(0, "the end");
  });
  expect(errors == Errors(2), "a blocked rank has kept its turn");
}

void loops_are_shared_once() {
  LoopShare share;
  std::atomic<bool> ended{false};
  std::vector<std::jthread> helpers;
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
  helpers.clear();
  expect(counts == std::vector(1000, shared), "an element was visited too often or not");
}

}  // namespace
}  // namespace pycollect::rank_threads

int main() {
  using namespace pycollect::rank_threads;
  for (const bool yes : {false, true}) {
    ranks_meet(yes);
    a_deadlock_reaches_every_rank(yes);
    a_stranger_counts_until_it_ends(yes);
  }
  a_blocked_rank_loses_its_turn();
  loops_are_shared_once();
  std::puts("scheduler_test: all good");
}
