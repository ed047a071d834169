// The shared page of the probe's processes, with their counters, handles and results, and the
// process group that waits on it. A wait throws Stopped once the watchdog has set `stop`.
#pragma once
#include <sched.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <new>
#include <string>
#include <thread>

#include "device.h"

namespace gpu_waits {

inline constexpr int kMaxRanks = 16;
inline constexpr int kMaxSamples = 2000;
// Counter value that releases every stream that waits for a counter in the page.
inline constexpr Word kReleased = Word{1} << 62;

struct Stopped : std::runtime_error {
  Stopped() : std::runtime_error("stopped by the watchdog") {}
};

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A counter on its own cache lines, so that writes to it do not slow reads of other counters.
struct alignas(128) PaddedCounter {
  std::atomic<Word> value;
};

// Progress of a process, read by the watchdog at the time limit. kMeasuringWhileBlocked: the
// process times its kernels while the streams of the other ranks are blocked.
enum Stage : Word { kStarting, kRunning, kMeasuringWhileBlocked, kFinished };

// Progress, handles and results of one rank, which is their only writer (except of `counter`).
struct RankState {
  PaddedCounter counter;    // for stream waits
  PaddedCounter published;  // for host waits: the last round whose signal is enqueued, or done
  PaddedCounter barriers;   // number of barriers that the rank has entered
  PaddedCounter stage;
  Handle memory, event;
  Word wrong;
  int samples, batches;  // set by rank 0 for all ranks
  double round[kMaxSamples], batch[kMaxSamples];
  double values[8];
  char failure[512];
};

struct Page {
  PaddedCounter stop;
  RankState ranks[kMaxRanks];
  std::size_t buffer_words;
  std::byte staging_buffers[];  // one staging buffer per rank, then the sum

  Word* staging_buffer(int rank) {
    return reinterpret_cast<Word*>(staging_buffers) + rank * buffer_words;
  }
};

inline std::size_t page_bytes(std::size_t buffer_words) {
  constexpr std::size_t kSize = 4096;
  const std::size_t bytes = sizeof(Page) + (kMaxRanks + 1) * buffer_words * sizeof(Word);
  return (bytes + kSize - 1) / kSize * kSize;
}

inline Page* new_page(std::size_t buffer_words) {
  void* at = mmap(nullptr, page_bytes(buffer_words), PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) throw std::runtime_error("mmap failed: no memory for the shared page");
  Page* const page = new (at) Page;
  page->buffer_words = buffer_words;
  return page;
}

// Group of the probe's processes, for one rank: its barrier and its waits on the page.
class ProcessGroup {
 public:
  ProcessGroup(Page& page, int rank, int world) : page_(page), rank_(rank), world_(world) {}

  // Waits until the counter is at least `least`: polls kPolls times, then yields between polls.
  void wait(const std::atomic<Word>& counter, Word least) const {
    for (int polls = 0; counter.load(std::memory_order_acquire) < least; ++polls) {
      if (polls > kPolls) sched_yield();
      if (page_.stop.value.load(std::memory_order_relaxed) != 0) throw Stopped();
    }
  }

  // Returns when all ranks have called it. With `sleeps` it sleeps between polls, for long waits
  // that are not timed.
  void barrier(bool sleeps = false) {
    page_.ranks[rank_].barriers.value.store(++barriers_, std::memory_order_release);
    for (int r = 0; r < world_; ++r) {
      const auto& peer = page_.ranks[r].barriers.value;
      while (sleeps && peer.load() < barriers_ && page_.stop.value.load() == 0)
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      wait(peer, barriers_);
    }
  }

  Page& page() const { return page_; }
  RankState& mine() const { return page_.ranks[rank_]; }
  RankState& rank_state(int rank) const { return page_.ranks[rank]; }
  int rank() const { return rank_; }
  int world() const { return world_; }

 private:
  static constexpr int kPolls = 200;
  Page& page_;
  const int rank_, world_;
  Word barriers_ = 0;
};

}  // namespace gpu_waits
