// Shares a loop with threads that are awake and have nothing to do: ranks that wait for a turn.
// They begin at once, while the threads of a pool that has been idle take 35 us to wake.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>

namespace pycollect::rank_threads {

class LoopShare {
 public:
  using Body = std::function<void(int64_t, int64_t)>;

  // Calls body(begin, end) for parts of [0, size), on this thread and on those that help. Returns
  // when all calls have returned. `body` must not throw. Returns false, and calls nothing, if no
  // thread is awake or another loop is being shared.
  bool try_run(int64_t size, int64_t grain, const Body& body) {
    if (awake_.load(std::memory_order_relaxed) == 0) return false;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) return false;
    const SharedLoop loop{body, size, std::max<int64_t>(grain, 1)};
    next_.store(0, std::memory_order_relaxed);
    loop_.store(&loop, std::memory_order_seq_cst);
    work_on(loop);
    loop_.store(nullptr, std::memory_order_seq_cst);
    while (helping_.load(std::memory_order_seq_cst) != 0) continue;  // for at most one part
    return true;
  }

  // Works on the loop that another thread runs, if there is one.
  void help() {
    if (loop_.load(std::memory_order_relaxed) == nullptr) return;
    helping_.fetch_add(1, std::memory_order_seq_cst);
    if (const SharedLoop* const loop = loop_.load(std::memory_order_seq_cst)) work_on(*loop);
    helping_.fetch_sub(1, std::memory_order_seq_cst);
  }

  // Counts the threads that call help() again and again.
  void count_awake(int more) { awake_.fetch_add(more, std::memory_order_relaxed); }

 private:
  struct SharedLoop {
    const Body& body;
    const int64_t size, grain;
  };
  void work_on(const SharedLoop& loop) {
    for (;;) {
      const int64_t begin = next_.fetch_add(loop.grain, std::memory_order_relaxed);
      if (begin >= loop.size) return;
      loop.body(begin, std::min(begin + loop.grain, loop.size));
    }
  }

  std::mutex mutex_;  // held while a loop is shared
  std::atomic<const SharedLoop*> loop_{nullptr};
  std::atomic<int64_t> next_{0};
  std::atomic<int> helping_{0}, awake_{0};
};

}  // namespace pycollect::rank_threads
