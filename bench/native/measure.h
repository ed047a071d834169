// A table of all-reduce times, for any implementation: float32 sums in place, buffers rewritten
// before each call, medians over repetitions. Small calls are timed in batches, because reading the
// clock costs a tenth of a call.
#pragma once
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace bench {

using Clock = std::chrono::steady_clock;

inline double microseconds(Clock::duration d) {
  return std::chrono::duration<double, std::micro>(d).count();
}

// The median and the 5 % percentile of times, the latter for cores without other load.
struct Times {
  double median, best;
};
inline Times summary(std::vector<double> all) {
  std::sort(all.begin(), all.end());
  return {all[all.size() / 2], all[all.size() / 20]};
}

// Pins the process to a core, a different one per rank as far as there are cores, like mpirun.
inline void pin(int rank) {
  cpu_set_t all, one;
  CPU_ZERO(&one);
  sched_getaffinity(0, sizeof all, &all);
  int left = rank % CPU_COUNT(&all), core = 0;
  while (!CPU_ISSET(core, &all) || left-- > 0) ++core;
  CPU_SET(core, &one);
  sched_setaffinity(0, sizeof one, &one);
}

struct Team {
  int rank, world;
};

// Returns the input of a rank. The buffer is rewritten by copying it, and this copy is part of the
// time of small calls.
inline std::vector<float> numbers(std::size_t n, int rank) {
  std::vector<float> all(n);
  for (std::size_t i = 0; i < n; ++i) all[i] = static_cast<float>(rank + 1 + i % 5);
  return all;
}

inline void check(const Team& team, const float* data, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    const double want = team.world * (team.world + 1) / 2 + team.world * static_cast<double>(i % 5);
    if (data[i] == want) continue;
    std::fprintf(stderr, "rank %d: element %zu is %f, not %f\n", team.rank, i, data[i], want);
    std::exit(1);
  }
}

// Returns each call's time on its slowest rank; exchanges the times with `reduce`.
template <class Reduce>
std::vector<double> slowest(const Team& team, const std::vector<double>& mine, Reduce&& reduce) {
  std::vector<float> all(mine.size() * team.world);
  for (std::size_t i = 0; i < mine.size(); ++i) all[i * team.world + team.rank] = mine[i];
  reduce(all.data(), all.size());
  std::vector<double> most;
  for (auto at = all.begin(); at != all.end(); at += team.world)
    most.push_back(*std::max_element(at, at + team.world));
  return most;
}

template <class Reduce, class Barrier>
Times time_size(const Team& team, float* data, std::size_t n, Reduce&& reduce, Barrier&& barrier) {
  const std::size_t bytes = n * sizeof(float);
  const int at_once = bytes <= 4096 ? 500 : 1;
  const int times =
      std::max<int>(15, std::min<int>(301, (256 << 20) / std::max<std::size_t>(bytes, 1)));
  const std::vector<float> fresh = numbers(n, team.rank);
  std::vector<double> all;
  for (int t = 0; t < times + 3; ++t) {
    std::memcpy(data, fresh.data(), bytes);
    barrier();
    const auto begin = Clock::now();
    for (int i = 0; i < at_once; ++i) {
      if (i > 0) std::memcpy(data, fresh.data(), bytes);
      reduce(data, n);
    }
    if (t >= 3) all.push_back(microseconds(Clock::now() - begin) / at_once);
    check(team, data, n);
    barrier();
  }
  return summary(slowest(team, all, reduce));
}

// Prints the table on rank 0; `data` has room for `most` bytes.
template <class Reduce, class Barrier>
void table(const Team& team, float* data, std::size_t most, Reduce&& reduce, Barrier&& barrier) {
  if (team.rank == 0)
    std::printf("%12s %12s %12s %10s\n", "bytes", "us (median)", "us (best)", "GB/s");
  std::vector<std::size_t> sizes{4, 64, 1024, 4096, 16384};
  for (std::size_t bytes = 65536; bytes <= most; bytes *= bytes < (1 << 20) ? 2 : 4)
    sizes.push_back(bytes);
  if (most == 128u << 20 && sizes.back() != most) sizes.push_back(most);
  for (const std::size_t bytes : sizes) {
    const Times us = time_size(team, data, bytes / sizeof(float), reduce, barrier);
    if (team.rank == 0)
      std::printf("%12zu %12.2f %12.2f %10.2f\n", bytes, us.median, us.best,
                  bytes / us.median / 1e3);
    if (team.rank == 0) std::fflush(stdout);
  }
}

}  // namespace bench
