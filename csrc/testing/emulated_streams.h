// Emulated streams: queues of work. The work runs when a caller needs its result, or on a thread if
// other processes wait for it, in any order that CUDA allows. Work that cannot run yet blocks only
// its own stream.
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

// A position in a stream: after the first `at` items of its work.
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

  // The caller of every function up to `pause_for` must hold this mutex. It is recursive, because
  // work runs while it is held, and running or destroying work may call this class again.
  std::recursive_mutex mutex;
  std::size_t add();
  void enqueue(std::size_t stream, Work work);
  bool step(std::size_t stream);  // runs the next item; returns false if none can run now
  bool advance(Point to);         // runs items up to `to`; returns whether it is reached
  Point end(std::size_t stream) const { return {stream, streams_[stream].enqueued}; }
  bool passed(Point point) const { return streams_[point.stream].done >= point.at; }
  bool is_idle(std::size_t stream) const { return passed(end(stream)); }
  bool eager() const { return eager_; }

  // Stops the stream after `after` more items of work, until `resume` is called.
  void stall(std::size_t stream, std::size_t after) {
    stalls_at_ = {stream, streams_[stream].done + after};
  }
  void resume() { stalls_at_ = kNowhere; }
  void start_thread();  // starts a thread that runs the work of all streams
  bool has_thread() const { return thread_.joinable(); }
  void pause_for(std::chrono::microseconds pause) { pause_ = pause; }

  // The caller of the functions below must not hold the mutex. `drain` runs a stream's work up to
  // `to`, or up to the work that is enqueued now: all of it if there is a thread, otherwise the
  // items that can run.
  void drain(Point to);
  void drain(std::size_t stream);
  // Drains all streams; returns false if the time limit passes first.
  bool drain_all(std::chrono::seconds limit);
  void stop();  // joins the thread, which may need the GIL; call without it

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
  // Finished work, destroyed without the mutex: freeing a tensor can take the GIL, whose owner may
  // be waiting for the mutex.
  std::vector<Work> finished_;
  Point stalls_at_ = kNowhere;
  bool closed_ = false;
  std::chrono::microseconds pause_{100};
  std::mt19937 random_{1};
  std::condition_variable_any changed_;
  std::thread thread_;
};

}  // namespace pycollect::cuda
