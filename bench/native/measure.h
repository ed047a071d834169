// Prints the times of all-reduces and of a barrier, for any implementation: float32 sums in place,
// buffers rewritten before each call, medians over repetitions. Small calls are timed in batches,
// because reading the clock costs a tenth of a call.
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
using Microseconds = std::chrono::duration<double, std::micro>;

inline double median(std::vector<double> all) {
  std::sort(all.begin(), all.end());
  return all[all.size() / 2];
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

// The measurements of a rank, by an implementation's calls `reduce(data, count)` and `barrier()`.
template <class Reduce, class Barrier>
struct RankBench {
  int rank, world;
  Reduce reduce;
  Barrier barrier;

  void check(const float* data, std::size_t n) const {
    for (std::size_t i = 0; i < n; ++i) {
      const double want = world * (world + 1) / 2 + world * static_cast<double>(i % 5);
      if (data[i] == want) continue;
      std::fprintf(stderr, "rank %d: element %zu is %f, not %f\n", rank, i, data[i], want);
      std::exit(1);
    }
  }

  // Returns the time of each call on its slowest rank. Exchanges the times with `reduce`.
  std::vector<double> slowest(const std::vector<double>& mine) const {
    std::vector<float> all(mine.size() * world);
    for (std::size_t i = 0; i < mine.size(); ++i) all[i * world + rank] = mine[i];
    reduce(all.data(), all.size());
    std::vector<double> longest;
    for (auto at = all.begin(); at != all.end(); at += world)
      longest.push_back(*std::max_element(at, at + world));
    return longest;
  }

  // The input is copied to `data` before a call; in a batch this copy is part of the time.
  double time_size(float* data, std::size_t n) const {
    const std::size_t bytes = n * sizeof(float);
    const int batch = bytes <= 4096 ? 500 : 1;
    const int repeats = std::clamp<int>((256 << 20) / bytes, 15, 301);
    std::vector<float> input(n);
    for (std::size_t i = 0; i < n; ++i) input[i] = static_cast<float>(rank + 1 + i % 5);
    std::vector<double> all;
    for (int t = 0; t < repeats + 3; ++t) {
      std::memcpy(data, input.data(), bytes);
      barrier();
      const auto begin = Clock::now();
      for (int i = 0; i < batch; ++i) {
        if (i > 0) std::memcpy(data, input.data(), bytes);
        reduce(data, n);
      }
      if (t >= 3) all.push_back(Microseconds(Clock::now() - begin).count() / batch);
      barrier();  // no rank checks on a core where another one is still in its call
      check(data, n);
    }
    return median(slowest(all));
  }

  // Returns the time of a barrier on this rank.
  double time_barrier() const {
    std::vector<double> all;
    for (int t = 0; t < 101; ++t) {
      const auto begin = Clock::now();
      for (int i = 0; i < 200; ++i) barrier();
      all.push_back(Microseconds(Clock::now() - begin).count() / 200);
    }
    return median(all);
  }

  // Prints bytes and microseconds of each size on rank 0, and those of a barrier as 0 bytes. `data`
  // has `largest_bytes` bytes.
  void print(float* data, std::size_t largest_bytes) const {
    std::vector<std::size_t> sizes{4, 64, 1024, 4096, 16384};
    for (std::size_t bytes = 65536; bytes <= largest_bytes; bytes *= bytes < (1 << 20) ? 2 : 4)
      sizes.push_back(bytes);
    if (largest_bytes == 128u << 20) sizes.push_back(largest_bytes);
    for (const std::size_t bytes : sizes) {
      const double us = time_size(data, bytes / sizeof(float));
      if (rank == 0) std::printf("%zu %.3f\n", bytes, us);
    }
    const double us = time_barrier();
    if (rank == 0) std::printf("0 %.3f\n", us);
    std::fflush(stdout);
  }
};

}  // namespace bench
