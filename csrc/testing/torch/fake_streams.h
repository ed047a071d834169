// Streams without a device, for tests: lists of work that is done as late as somebody asks for it,
// or by a thread of their own when other processes wait for it. Work that cannot be done yet holds
// up its stream and no other.
#pragma once
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace pycollect::dist {

class FakeStreams {
 public:
  enum Name : std::size_t { kCaller, kGroup, kFirstOther };
  using Work = std::function<bool()>;  // false: it cannot be done yet

  explicit FakeStreams(bool eager) : eager_(eager), streams_(kFirstOther) {}
  ~FakeStreams();
  FakeStreams(const FakeStreams&) = delete;
  FakeStreams& operator=(const FakeStreams&) = delete;

  // All of these are called under the mutex, and so is the work.
  std::mutex mutex;
  std::size_t add();
  void enqueue(std::size_t stream, Work work);
  bool step(std::size_t stream);                     // false: there is nothing that can be done
  bool advance(std::size_t stream, std::size_t to);  // as far as it goes without waiting
  std::size_t done(std::size_t stream) const { return streams_[stream].done; }
  std::size_t enqueued(std::size_t stream) const { return streams_[stream].enqueued; }
  bool eager() const { return eager_; }

  // The caller's comes to nothing behind so many more pieces of work.
  void stall(bool on, std::size_t after) {
    stalls_at_ = on ? streams_[kCaller].done + after : kNever;
  }
  // From now on a thread does the work too: a step of each stream, and then a pause.
  void run_by_themselves();
  void pause_for(std::chrono::microseconds pause) { pause_ = pause; }

  // Without the mutex: until a stream is empty, if it runs by itself, or as far as it goes.
  void drain(std::size_t stream);

 private:
  struct Stream {
    std::deque<Work> work = {};
    std::size_t done = 0, enqueued = 0;
  };
  void serve();
  bool is_stalled(std::size_t stream) const {
    return stream == kCaller && streams_[kCaller].done >= stalls_at_;
  }

  const bool eager_;
  std::deque<Stream> streams_;
  // What has been done: letting go of a tensor can take the interpreter's lock, whose holder may be
  // waiting for ours.
  std::vector<Work> spent_;
  static constexpr std::size_t kNever = -1;
  std::size_t stalls_at_ = kNever;
  bool closed_ = false;
  std::chrono::microseconds pause_{100};
  std::condition_variable changed_;
  std::thread thread_;
};

}  // namespace pycollect::dist
