// Measures a group: its construction, an exchange between all ranks, the same beside a process that
// keeps a core busy, and the wake-up from a sleeping wait. Prints medians in microseconds.
#include <signal.h>

#include <algorithm>

#include "group_ranks.h"

namespace pycollect::ipc {
namespace {

using Microseconds = std::chrono::duration<double, std::micro>;

double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + values.size() / 2);
  return values[values.size() / 2];
}

// Rank 0's median of `times` values, each of a new group: from `body`, or the construction time.
double measure(int world, int times, const std::function<double(Group&)>& body) {
  const TemporaryFolder folder;
  GroupSettings settings = quick_settings();
  settings.buffer_bytes = 512 << 10;
  settings.symmetric_heap_bytes = std::size_t{32} << 30;
  const auto ends = run(world, settings, [&](RankContext& me) {
    std::vector<double> all;
    for (int i = 0; i < times; ++i) {
      FileStore store(text(folder.path(), "/", i));
      const auto begin = Clock::now();
      Group group(store, me.rank, me.world, me.settings);
      const double construction = Microseconds(Clock::now() - begin).count();
      all.push_back(body ? body(group) : construction);
    }
    return text(median(all));
  });
  return std::stod(ends[0].result);
}

double time_exchange(Group& group) {
  constexpr int kRounds = 2000;
  std::vector<double> parts;
  const OpContext now{"exchange", 1, Clock::now() + 60s};
  for (int i = 1; i <= 20 * kRounds;) {
    const auto begin = Clock::now();
    for (const int end = i + kRounds; i < end; ++i) {
      group.advance(at_run(i));
      for (Rank r = 0; r < group.world(); ++r) group.await(r, at_run(i), now);
    }
    parts.push_back(Microseconds(Clock::now() - begin).count() / kRounds);
  }
  return median(parts);
}

// Time from rank 1's signal, after 20 ms without any event, until rank 0's wait ends.
double time_wake(Group& group) {
  std::vector<double> times;
  const OpContext now{"wake", 1, Clock::now() + 60s};
  for (int i = 1; i <= 20; ++i) {
    auto* stamp = reinterpret_cast<std::atomic<int64_t>*>(group.staging_buffer(1, 0));
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
}  // namespace pycollect::ipc

int main() {
  using namespace pycollect::ipc;
  for (int world : {2, 4, 8}) print("make a group", world, measure(world, 15, {}));
  for (int world : {2, 4, 8}) print("exchange", world, measure(world, 1, time_exchange));
  print("wake-up after 20 ms", 2, measure(2, 1, time_wake));
  const pid_t busy = fork();
  if (busy == 0)
    for (;;) pycollect::ipc::pause();
  for (int world : {2, 4, 8})
    print("exchange beside a busy process", world, measure(world, 1, time_exchange));
  kill(busy, SIGKILL);
}
