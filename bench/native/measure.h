// Prints a table of all-reduce times, for any implementation: float32 sums in place, buffers
// rewritten before each call, medians over repetitions; then the time of a barrier. Small calls are
// timed in batches, because reading the clock costs a tenth of a call.
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

// Median and 5 % percentile of times. The latter estimates the time on cores without other load.
struct Times {
  double median, best;
};
inline Times summary(std::vector<double> all) {
  std::sort(all.begin(), all.end());
  return {all[all.size() / 2], all[all.size() / 20]};
}

// Pins the process to a core, like mpirun: ranks get different cores until all cores are taken.
inline void pin(int rank) {
  cpu_set_t all, one;
  CPU_ZERO(&one);
  sched_getaffinity(0, sizeof all, &all);
  int left = rank % CPU_COUNT(&all), core = 0;
  while (!CPU_ISSET(core, &all) || left-- > 0) ++core;
  CPU_SET(core, &one);
  sched_setaffinity(0, sizeof one, &one);
}

struct RankInfo {
  int rank, world;
};

// Returns the input of a rank. Before a call it is copied to the buffer; in a batch of small calls
// this copy is part of the time.
inline std::vector<float> rank_input(std::size_t n, int rank) {
  std::vector<float> all(n);
  for (std::size_t i = 0; i < n; ++i) all[i] = static_cast<float>(rank + 1 + i % 5);
  return all;
}

inline void check(const RankInfo& self, const float* data, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    const double want = self.world * (self.world + 1) / 2 + self.world * static_cast<double>(i % 5);
    if (data[i] == want) continue;
    std::fprintf(stderr, "rank %d: element %zu is %f, not %f\n", self.rank, i, data[i], want);
    std::exit(1);
  }
}

// Returns the time of each call on its slowest rank. Exchanges the times with `reduce`.
template <class Reduce>
std::vector<double> slowest(const RankInfo& self, const std::vector<double>& mine,
                            Reduce&& reduce) {
  std::vector<float> all(mine.size() * self.world);
  for (std::size_t i = 0; i < mine.size(); ++i) all[i * self.world + self.rank] = mine[i];
  reduce(all.data(), all.size());
  std::vector<double> longest;
  for (auto at = all.begin(); at != all.end(); at += self.world)
    longest.push_back(*std::max_element(at, at + self.world));
  return longest;
}

template <class Reduce, class Barrier>
Times time_size(const RankInfo& self, float* data, std::size_t n, Reduce&& reduce,
                Barrier&& barrier) {
  const std::size_t bytes = n * sizeof(float);
  const int batch = bytes <= 4096 ? 500 : 1;
  const int repeats =
      std::max<int>(15, std::min<int>(301, (256 << 20) / std::max<std::size_t>(bytes, 1)));
  const std::vector<float> input = rank_input(n, self.rank);
  std::vector<double> all;
  for (int t = 0; t < repeats + 3; ++t) {
    std::memcpy(data, input.data(), bytes);
    barrier();
    const auto begin = Clock::now();
    for (int i = 0; i < batch; ++i) {
      if (i > 0) std::memcpy(data, input.data(), bytes);
      reduce(data, n);
    }
    if (t >= 3) all.push_back(microseconds(Clock::now() - begin) / batch);
    check(self, data, n);
    barrier();
  }
  return summary(slowest(self, all, reduce));
}

// Returns the time of a barrier on this rank.
template <class Barrier>
Times time_barrier(Barrier&& barrier) {
  std::vector<double> all;
  for (int t = 0; t < 101; ++t) {
    const auto begin = Clock::now();
    for (int i = 0; i < 200; ++i) barrier();
    all.push_back(microseconds(Clock::now() - begin) / 200);
  }
  return summary(all);
}

// Prints the table on rank 0. `data` has `largest_bytes` bytes.
template <class Reduce, class Barrier>
void table(const RankInfo& self, float* data, std::size_t largest_bytes, Reduce&& reduce,
           Barrier&& barrier) {
  if (self.rank == 0)
    std::printf("%12s %12s %12s %10s\n", "bytes", "us (median)", "us (best)", "GB/s");
  std::vector<std::size_t> sizes{4, 64, 1024, 4096, 16384};
  for (std::size_t bytes = 65536; bytes <= largest_bytes; bytes *= bytes < (1 << 20) ? 2 : 4)
    sizes.push_back(bytes);
  if (largest_bytes == 128u << 20 && sizes.back() != largest_bytes) sizes.push_back(largest_bytes);
  for (const std::size_t bytes : sizes) {
    const Times us = time_size(self, data, bytes / sizeof(float), reduce, barrier);
    if (self.rank == 0)
      std::printf("%12zu %12.3f %12.3f %10.2f\n", bytes, us.median, us.best,
                  bytes / us.median / 1e3);
    if (self.rank == 0) std::fflush(stdout);
  }
  const Times us = time_barrier(barrier);
  if (self.rank == 0) std::printf("%12s %12.3f %12.3f\n", "barrier", us.median, us.best);
  std::fflush(stdout);
}

}  // namespace bench
