// Experiment: whether a stream that waits for a counter keeps kernels of another process, or of
// another stream of its own process, from running. All ranks but the last block a stream. The last
// rank runs kernels before that and while the streams are blocked, and then releases them.
#pragma once
#include <algorithm>

#include "page.h"

namespace gpu_waits {

// Indices of RankState::values: WorkerValue for the last rank, BlockedValue for all other ranks.
enum WorkerValue { kFree, kFreeBurst, kBlocked, kBlockedBurst, kReleasedAt };
enum BlockedValue { kHeld, kOwnSecondStream, kUntilReleased };

class Blocked {
 public:
  // `counters` has one counter per rank. Only the stream of that rank waits for it.
  Blocked(Device& device, ProcessGroup& group, Word* words, std::vector<Word*> counters,
          bool pinned)
      : device_(device),
        group_(group),
        words_(words),
        counters_(std::move(counters)),
        pinned_(pinned),
        stream_(device.new_stream()),
        second_(device.new_stream()) {}

  void run() {
    for (Stream stream : {stream_, second_}) {  // loads CUDA modules before any stream waits
      kernel(stream);
      device_.wait(stream, counters_[group_.rank()], 0);
      device_.synchronize(stream);
    }
    if (group_.rank() == group_.world() - 1) {
      device_.write(stream_, counters_[group_.rank()], 1);
      device_.synchronize(stream_);
      work();
    } else {
      block();
    }
  }

 private:
  static constexpr int kTimes = 50, kBurst = 500;
  // Time for a stream to block; timeout of a kernel on the second stream.
  static constexpr double kSettleSeconds = 0.02, kTimeoutSeconds = 1.0;

  void kernel(Stream stream) { device_.fill(stream, words_, 1, 1); }

  // Sets `one` to the median microseconds until a single kernel is done, and `burst` to the
  // microseconds per kernel of many in a row.
  void measure(double& one, double& burst) {
    std::vector<double> seconds(kTimes);
    for (double& s : seconds) {
      const double begin = now();
      kernel(stream_);
      device_.synchronize(stream_);
      s = now() - begin;
    }
    std::nth_element(seconds.begin(), seconds.begin() + kTimes / 2, seconds.end());
    one = seconds[kTimes / 2] * 1e6;
    const double begin = now();
    for (int i = 0; i < kBurst; ++i) kernel(stream_);
    device_.synchronize(stream_);
    burst = (now() - begin) / kBurst * 1e6;
  }

  void work() {
    double* const values = group_.mine().values;
    group_.barrier(true);
    measure(values[kFree], values[kFreeBurst]);
    group_.barrier(true);
    group_.barrier(true);  // the other ranks' streams are blocked
    group_.mine().stage.value.store(kMeasuringWhileBlocked);
    measure(values[kBlocked], values[kBlockedBurst]);
    group_.mine().stage.value.store(kRunning);
    group_.barrier(true);
    group_.barrier(true);  // the other ranks have tried their second streams
    // Time for the other ranks to begin to wait for their streams.
    std::this_thread::sleep_for(std::chrono::duration<double>(kSettleSeconds));
    values[kReleasedAt] = now();
    for (int r = 0; r < group_.world() - 1; ++r) {
      if (pinned_)
        group_.rank_state(r).counter.value.store(1, std::memory_order_release);
      else
        device_.write(stream_, counters_[r], 1);
    }
    device_.synchronize(stream_);
    group_.barrier(true);
  }

  void block() {
    double* const values = group_.mine().values;
    group_.barrier(true);
    group_.barrier(true);
    device_.wait(stream_, counters_[group_.rank()], 1);
    kernel(stream_);
    std::this_thread::sleep_for(std::chrono::duration<double>(kSettleSeconds));
    values[kHeld] = device_.is_done(stream_) ? 0 : 1;
    group_.barrier(true);
    group_.barrier(true);
    values[kOwnSecondStream] = second_stream();
    group_.barrier(true);
    device_.synchronize(stream_);
    const double end = now();
    group_.barrier(true);
    values[kUntilReleased] =
        (end - group_.rank_state(group_.world() - 1).values[kReleasedAt]) * 1e6;
  }

  // Returns the microseconds of a kernel on the second stream, or -1 after kTimeoutSeconds.
  double second_stream() {
    const double begin = now();
    kernel(second_);
    while (!device_.is_done(second_))
      if (now() - begin > kTimeoutSeconds) return -1;
    return (now() - begin) * 1e6;
  }

  Device& device_;
  ProcessGroup& group_;
  Word* const words_;
  const std::vector<Word*> counters_;
  const bool pinned_;
  const Stream stream_, second_;
};

}  // namespace gpu_waits
