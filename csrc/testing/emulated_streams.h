// Emulated streams: queues of work that runs only when a caller needs it, or on a thread of their
// own where other processes wait for it, in any order that streams allow. Work that cannot run yet
// blocks its own stream and no other.
#pragma once
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace pycollect::cuda {

// A position in a stream: behind the first `at` pieces of its work.
struct Point {
  std::size_t stream, at;
};

class EmulatedStreams {
 public:
  using Work = std::function<bool()>;  // returns false while the work cannot run yet
  using Lock = std::unique_lock<std::recursive_mutex>;

  explicit EmulatedStreams(bool eager) : eager_(eager) {}
  ~EmulatedStreams() { stop(); }
  EmulatedStreams(const EmulatedStreams&) = delete;
  EmulatedStreams& operator=(const EmulatedStreams&) = delete;

  // Guards every call up to pause_for: the caller holds it. Recursive, because work also runs under
  // it, and both running and releasing work may call back into this class.
  std::recursive_mutex mutex;
  std::size_t add();
  void enqueue(std::size_t stream, Work work);
  bool step(std::size_t stream);  // runs the next piece of work; false: none can run now
  bool advance(Point to);         // runs what can run up to `to`; true: the point is reached
  Point end(std::size_t stream) const { return {stream, streams_[stream].enqueued}; }
  bool passed(Point point) const { return streams_[point.stream].done >= point.at; }
  bool is_idle(std::size_t stream) const { return passed(end(stream)); }
  bool eager() const { return eager_; }

  // The stream stops after `after` more pieces of work, until go_on().
  void stall(std::size_t stream, std::size_t after) {
    stalls_at_ = {stream, streams_[stream].done + after};
  }
  void go_on() { stalls_at_ = kNowhere; }
  void run_by_themselves();  // starts a thread that runs the work of all streams
  bool run_themselves() const { return thread_.joinable(); }
  void pause_for(std::chrono::microseconds pause) { pause_ = pause; }

  // The caller of these does not hold the mutex. `drain` runs the work that is on a stream now: all
  // of it if a thread runs the streams, else as far as possible without waiting.
  void drain(std::size_t stream);
  // Drains all streams; returns false if the time limit passes first.
  bool drain_all(std::chrono::seconds limit);
  void stop();  // joins the thread, which may need the interpreter's lock

 private:
  struct StreamQueue {
    std::deque<Work> work = {};
    std::size_t done = 0, enqueued = 0;
  };
  void serve();
  bool is_stalled(std::size_t stream) const {
    return stalls_at_.stream == stream && streams_[stream].done >= stalls_at_.at;
  }
  static constexpr Point kNowhere{static_cast<std::size_t>(-1), 0};

  const bool eager_;
  std::deque<StreamQueue> streams_;
  // Finished work, destroyed without the mutex: releasing a tensor can take the interpreter's lock,
  // whose holder may be waiting for the mutex.
  std::vector<Work> spent_;
  Point stalls_at_ = kNowhere;
  bool closed_ = false;
  std::chrono::microseconds pause_{100};
  std::mt19937 random_{1};
  std::condition_variable_any changed_;
  std::thread thread_;
};

}  // namespace pycollect::cuda
