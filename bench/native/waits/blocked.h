// Experiment: whether a stream that waits for a counter keeps kernels of another process, or of
// another stream of its process, from running. All ranks but the last block a stream. The last rank
// runs kernels before and meanwhile, and then releases the streams.
#pragma once
#include <algorithm>

#include "page.h"

namespace waits {

// Indices of OfRank::values: OfWorker for the last rank, OfBlocked for all others.
enum OfWorker { kFree, kFreeBurst, kBlocked, kBlockedBurst, kReleasedAt };
enum OfBlocked { kHeld, kOwnSecondStream, kUntilReleased };

class Blocked {
 public:
  // `counters` has one counter per rank, for which only that rank's stream waits.
  Blocked(Device& device, Rendezvous& meeting, Word* words, std::vector<Word*> counters,
          bool pinned)
      : device_(device),
        meeting_(meeting),
        words_(words),
        counters_(std::move(counters)),
        pinned_(pinned),
        stream_(device.new_stream()),
        second_(device.new_stream()) {}

  void run() {
    for (Stream stream : {stream_, second_}) {  // loads CUDA modules before any stream waits
      kernel(stream);
      device_.wait(stream, counters_[meeting_.rank()], 0);
      device_.synchronize(stream);
    }
    if (meeting_.rank() == meeting_.world() - 1) {
      device_.write(stream_, counters_[meeting_.rank()], 1);
      device_.synchronize(stream_);
      work();
    } else {
      block();
    }
  }

 private:
  static constexpr int kTimes = 50, kBurst = 500;
  static constexpr double kNap = 0.02, kPatience = 1.0;

  void kernel(Stream stream) { device_.fill(stream, words_, 1, 1); }

  // Sets `one` to the median microseconds of a kernel until it is done, and `burst` to those per
  // kernel of many in a row.
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
    double* const values = meeting_.mine().values;
    meeting_.all(true);
    measure(values[kFree], values[kFreeBurst]);
    meeting_.all(true);
    meeting_.all(true);  // the other ranks' streams are blocked
    meeting_.mine().stage.value.store(kBesideBlocked);
    measure(values[kBlocked], values[kBlockedBurst]);
    meeting_.mine().stage.value.store(kRunning);
    meeting_.all(true);
    meeting_.all(true);  // the other ranks have tried their second streams
    // Lets the other ranks enter the wait for their streams.
    std::this_thread::sleep_for(std::chrono::duration<double>(kNap));
    values[kReleasedAt] = now();
    for (int r = 0; r < meeting_.world() - 1; ++r) {
      if (pinned_)
        meeting_.of(r).counter.value.store(1, std::memory_order_release);
      else
        device_.write(stream_, counters_[r], 1);
    }
    device_.synchronize(stream_);
    meeting_.all(true);
  }

  void block() {
    double* const values = meeting_.mine().values;
    meeting_.all(true);
    meeting_.all(true);
    device_.wait(stream_, counters_[meeting_.rank()], 1);
    kernel(stream_);
    std::this_thread::sleep_for(std::chrono::duration<double>(kNap));
    values[kHeld] = device_.is_done(stream_) ? 0 : 1;
    meeting_.all(true);
    meeting_.all(true);
    values[kOwnSecondStream] = second_stream();
    meeting_.all(true);
    device_.synchronize(stream_);
    const double end = now();
    meeting_.all(true);
    values[kUntilReleased] = (end - meeting_.of(meeting_.world() - 1).values[kReleasedAt]) * 1e6;
  }

  // Returns the microseconds of a kernel on the second stream, or -1 after kPatience seconds.
  double second_stream() {
    const double begin = now();
    kernel(second_);
    while (!device_.is_done(second_))
      if (now() - begin > kPatience) return -1;
    return (now() - begin) * 1e6;
  }

  Device& device_;
  Rendezvous& meeting_;
  Word* const words_;
  const std::vector<Word*> counters_;
  const bool pinned_;
  const Stream stream_, second_;
};

}  // namespace waits
