// Does a stream that waits for a counter keep another process's kernels, or another stream of its
// own process, from running? All ranks but the last block a stream; the last one works, before and
// meanwhile, and then releases them.
#pragma once
#include <algorithm>

#include "page.h"

namespace waits {

// What the values in the page are, of the last rank, then of the others.
enum OfWorker { kFree, kFreeBurst, kBlocked, kBlockedBurst, kReleasedAt };
enum OfBlocked { kHeld, kOwnSecondStream, kUntilReleased };

class Blocked {
 public:
  // `counters`: each rank's own, which only its owner's stream waits for.
  Blocked(Device& device, Meeting& meeting, Word* words, std::vector<Word*> counters, bool pinned)
      : device_(device),
        meeting_(meeting),
        words_(words),
        counters_(std::move(counters)),
        pinned_(pinned),
        stream_(device.new_stream()),
        second_(device.new_stream()) {}

  void run() {
    for (Stream stream : {stream_, second_}) {  // modules are loaded now, not beside a wait
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

  // Microseconds: the median of a kernel until it is done, and one of many.
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
    meeting_.all(true);  // the others are blocked
    meeting_.mine().stage.value.store(kBesideBlocked);
    measure(values[kBlocked], values[kBlockedBurst]);
    meeting_.mine().stage.value.store(kRunning);
    meeting_.all(true);
    meeting_.all(true);  // the others have tried their second streams
    std::this_thread::sleep_for(std::chrono::duration<double>(kNap));  // all wait for their stream
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

  // Microseconds that a kernel on it takes, or -1 if it does not end.
  double second_stream() {
    const double begin = now();
    kernel(second_);
    while (!device_.is_done(second_))
      if (now() - begin > kPatience) return -1;
    return (now() - begin) * 1e6;
  }

  Device& device_;
  Meeting& meeting_;
  Word* const words_;
  const std::vector<Word*> counters_;
  const bool pinned_;
  const Stream stream_, second_;
};

}  // namespace waits
