// Emulated streams: queues of work, which runs in an order that CUDA allows: when the host needs
// its result, earlier, or on a thread if other processes wait for it. Work that cannot run yet
// blocks only its own stream.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
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

// `late`: work runs when the host waits for it, after the work that it waits for and no other.
// `eager`: it runs as soon as it is enqueued, unless the stream is a caller's. `as_issued`: all
// work does, as with CUDA_LAUNCH_BLOCKING=1. `random`: any work that may run runs at any time.
enum class WorkOrder { late, eager, as_issued, random };

class EmulatedStreams {
 public:
  using Work = std::function<bool()>;  // returns false while the work cannot run yet
  using Lock = std::unique_lock<std::recursive_mutex>;

  EmulatedStreams() = default;
  ~EmulatedStreams() { stop(); }
  EmulatedStreams(const EmulatedStreams&) = delete;
  EmulatedStreams& operator=(const EmulatedStreams&) = delete;

  // The caller of every function up to `has_thread` must hold this mutex. It is recursive, because
  // work runs while it is held, and running or destroying work may call this class again.
  std::recursive_mutex mutex;
  std::size_t add(bool of_caller);
  void enqueue(std::size_t stream, Work work);
  bool step(std::size_t stream);  // runs the next item; returns false if none can run now
  bool advance(Point to);         // runs items up to `to`; returns whether it is passed
  // For work that waits for `to`: returns whether it is passed, after running items up to it unless
  // the order is random.
  bool reach(Point to);
  // Returns the numbers 0 to count - 1, shuffled if the order is random.
  std::vector<std::size_t> any_order(std::size_t count);
  Point end(std::size_t stream) const { return {stream, streams_[stream].enqueued}; }
  bool passed(Point point) const { return streams_[point.stream].done >= point.at; }

  void stall(std::size_t stream) { stalled_ = stream; }  // stops it until `resume` is called
  void resume() { stalled_ = kNone; }
  bool is_idle() const;  // whether all work is done
  bool has_thread() const { return thread_.joinable(); }

  // The caller of the functions below must not hold the mutex.
  void set_order(WorkOrder order, std::uint64_t seed = 1);
  void start_thread();             // starts a thread that runs the work of all streams
  void pause_for(double seconds);  // sets the thread's pause between two rounds
  // Runs a stream's work up to `to`, or up to the work that is enqueued now: all of it if there is
  // a thread, otherwise the items that can run.
  void drain(Point to);
  void drain(std::size_t stream);
  // Drains all streams; returns false if the time limit passes first.
  bool drain_all(std::chrono::seconds limit);
  void stop();  // joins the thread, which may need the GIL; call without it

 private:
  struct StreamQueue {
    bool of_caller;
    std::deque<Work> work = {};
    std::size_t done = 0, enqueued = 0;
  };
  void serve();
  // Runs the next item of the first stream that can run one, in an order that changes now and then:
  // a stream runs far ahead of the others, which a fair choice hardly ever lets it.
  bool step_any();
  static constexpr std::size_t kNone = -1;

  WorkOrder order_ = WorkOrder::late;
  std::uint64_t earliness_ = 0;  // of 4; how likely an item runs while others are enqueued
  std::vector<std::size_t> turns_;
  std::deque<StreamQueue> streams_;
  // Finished work, destroyed without the mutex: freeing a tensor can take the GIL, whose owner may
  // be waiting for the mutex.
  std::vector<Work> finished_;
  std::size_t stalled_ = kNone;
  bool closed_ = false;
  std::chrono::microseconds pause_{100};
  std::mt19937_64 random_{1};
  std::condition_variable_any changed_;
  std::thread thread_;
};

}  // namespace pycollect::cuda
