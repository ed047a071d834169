// Streams without a device: lists of work that is done as late as somebody asks for it, or by a
// thread of their own when other processes wait for it, in any order that streams allow. Work that
// cannot be done yet holds up its stream and no other.
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

// Behind what a stream had when somebody looked.
struct Point {
  std::size_t stream, at;
};

class EmulatedStreams {
 public:
  using Work = std::function<bool()>;  // false: it cannot be done yet
  using Lock = std::unique_lock<std::recursive_mutex>;

  explicit EmulatedStreams(bool eager) : eager_(eager) {}
  ~EmulatedStreams() { stop(); }
  EmulatedStreams(const EmulatedStreams&) = delete;
  EmulatedStreams& operator=(const EmulatedStreams&) = delete;

  // All of these are called under the mutex, and so is the work, whose end may come back here.
  std::recursive_mutex mutex;
  std::size_t add();
  void enqueue(std::size_t stream, Work work);
  bool step(std::size_t stream);  // false: there is nothing that can be done
  bool advance(Point to);         // as far as it goes without waiting: is it there?
  Point end(std::size_t stream) const { return {stream, streams_[stream].enqueued}; }
  bool passed(Point point) const { return streams_[point.stream].done >= point.at; }
  bool is_idle(std::size_t stream) const { return passed(end(stream)); }
  bool eager() const { return eager_; }

  // This one comes to nothing behind so many more pieces of work.
  void stall(std::size_t stream, std::size_t after) {
    stalls_at_ = {stream, streams_[stream].done + after};
  }
  void go_on() { stalls_at_ = kNowhere; }
  void run_by_themselves();  // from now on a thread does the work too
  bool run_themselves() const { return thread_.joinable(); }
  void pause_for(std::chrono::microseconds pause) { pause_ = pause; }

  // Without the mutex: until a stream is empty, if it runs by itself, or as far as it goes.
  void drain(std::size_t stream);
  // The same of all of them, with a limit: is nothing left?
  bool drain_all(std::chrono::seconds limit);
  void stop();  // the thread, which may need the interpreter

 private:
  struct Stream {
    std::deque<Work> work = {};
    std::size_t done = 0, enqueued = 0;
  };
  void serve();
  bool is_stalled(std::size_t stream) const {
    return stalls_at_.stream == stream && streams_[stream].done >= stalls_at_.at;
  }
  static constexpr Point kNowhere{static_cast<std::size_t>(-1), 0};

  const bool eager_;
  std::deque<Stream> streams_;
  // What has been done: letting go of a tensor can take the interpreter's lock, whose holder may be
  // waiting for ours.
  std::vector<Work> spent_;
  Point stalls_at_ = kNowhere;
  bool closed_ = false;
  std::chrono::microseconds pause_{100};
  std::mt19937 random_{1};
  std::condition_variable_any changed_;
  std::thread thread_;
};

}  // namespace pycollect::cuda
