// What a group costs: to make it, an exchange between all ranks, the same beside a process that
// takes a core for itself, and a wait that ended in the kernel. Medians, in microseconds.
#include <signal.h>

#include <algorithm>

#include "group_ranks.h"

namespace pycollect::shm {
namespace {

using Microseconds = std::chrono::duration<double, std::micro>;

double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + values.size() / 2);
  return values[values.size() / 2];
}

// By rank 0, of `times` that `body` takes a group for.
double measure(int world, int times, const std::function<double(Group&)>& body) {
  const Folder boards;
  Settings settings = quick();
  settings.slot_bytes = 512 << 10;
  settings.arena_bytes = std::size_t{32} << 30;
  const auto ends = run(world, settings, [&](Me& me) {
    std::vector<double> all;
    for (int i = 0; i < times; ++i) {
      FolderBoard board(text(boards.path(), "/", i));
      const auto begin = Clock::now();
      Group group(board, me.rank, me.world, me.settings);
      const double made = Microseconds(Clock::now() - begin).count();
      all.push_back(body ? body(group) : made);
    }
    return text(median(all));
  });
  return std::stod(ends[0].said);
}

double exchange(Group& group) {
  constexpr int kTurns = 2000;
  std::vector<double> parts;
  const Occasion now{"exchange", 1, Clock::now() + 60s};
  for (int i = 1; i <= 20 * kTurns;) {
    const auto begin = Clock::now();
    for (const int end = i + kTurns; i < end; ++i) {
      group.advance(at_run(i));
      for (Rank r = 0; r < group.world(); ++r) group.await(r, at_run(i), now);
    }
    parts.push_back(Microseconds(Clock::now() - begin).count() / kTurns);
  }
  return median(parts);
}

// From rank 1's step, after 20 ms in which nothing happened, to rank 0 seeing it.
double wake(Group& group) {
  std::vector<double> times;
  const Occasion now{"wake", 1, Clock::now() + 60s};
  for (int i = 1; i <= 20; ++i) {
    auto* stamp = reinterpret_cast<std::atomic<int64_t>*>(group.slot(1, 0));
    if (group.rank() == 1) {
      std::this_thread::sleep_for(20ms);
      *stamp = Clock::now().time_since_epoch().count();
      group.advance(at_run(i));
      group.await(0, at_run(i), now);
    } else {
      group.await(1, at_run(i), now);
      times.push_back((Clock::now().time_since_epoch().count() - *stamp) / 1e3);
      group.advance(at_run(i));
    }
  }
  return times.empty() ? 0 : median(times);
}

void print(const char* what, int world, double microseconds) {
  std::printf("%-36s %2d ranks %10.2f us\n", what, world, microseconds);
  std::fflush(stdout);
}

}  // namespace
}  // namespace pycollect::shm

int main() {
  using namespace pycollect::shm;
  for (int world : {2, 4, 8}) print("make a group", world, measure(world, 15, {}));
  for (int world : {2, 4, 8}) print("exchange", world, measure(world, 1, exchange));
  print("wake-up after 20 ms", 2, measure(2, 1, wake));
  const pid_t busy = fork();
  if (busy == 0)
    for (;;) pycollect::shm::pause();
  for (int world : {2, 4, 8})
    print("exchange beside a busy process", world, measure(world, 1, exchange));
  kill(busy, SIGKILL);
}
