// A receive of a message that lies deep in the ring of a rank that has left, while the receiver's
// other threads compete for the mailbox lock, and one of them was stopped while it held the lock.
#pragma once
#include <csignal>

#include "mailbox_ranks.h"

namespace pycollect::ipc {

inline std::atomic<bool> stopped{false}, has_stopped{false};

// SIGUSR1 handler: keeps the thread that runs it stopped while `stopped` is true.
inline void stop_here(int) {
  has_stopped = true;
  while (stopped) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  has_stopped = false;
}

// Threads that take the mailbox lock again and again, and move no bytes.
class Busy {
 public:
  // Returns when all threads run: a thread that is stopped while it starts may hold the allocator's
  // lock.
  explicit Busy(Mailbox& box) {
    constexpr int kThreads = 3;
    auto* const events = (RemoteEvents*)&box;  // the only cast that reaches a private base
    for (int i = 0; i < kThreads; ++i)
      threads_.emplace_back([this, events, me = box.rank()](const std::stop_token& end) {
        for (++running_; !end.stop_requested(); ++count_) events->called(me);
      });
    while (running_ < kThreads) std::this_thread::yield();
  }

  // Returns when one thread is stopped and holds the lock. If that never happens, as may be with a
  // sanitizer, the thread runs on after kTries attempts.
  void stop_one() {
    constexpr int kTries = 50;
    bool free = true;
    for (int i = 0; i < kTries && free; ++i) {
      stopped = true;
      pthread_kill(threads_.front().native_handle(), SIGUSR1);
      while (!has_stopped) std::this_thread::yield();
      const uint64_t before = count_;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      free = count_ != before;  // another thread got the lock
      if (free) resume();
    }
  }
  void resume() {
    stopped = false;
    while (has_stopped) std::this_thread::yield();
  }

 private:
  std::atomic<int> running_{0};
  std::atomic<uint64_t> count_{0};
  std::vector<std::jthread> threads_;
};

inline void message_deep_in_the_ring(const Member& m) {
  constexpr int kMany = 1500;
  int word = m.rank;
  std::byte* const at = reinterpret_cast<std::byte*>(&word);
  if (m.rank == 1) {
    for (int i = 0; i <= kMany; ++i) m.wait(m.box.send(0, envelope(4, i == kMany ? 2 : 1), at));
    return;
  }
  while (m.group.rank_state(1).left.load() == 0) std::this_thread::yield();
  const auto received = m.box.receive(1, envelope(4, 2), at);
  std::signal(SIGUSR1, stop_here);
  Busy busy(m.box);
  busy.stop_one();
  std::jthread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    busy.resume();
  });
  m.wait(received);
  check(word == 1);
}

}  // namespace pycollect::ipc
