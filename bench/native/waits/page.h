// The page that the processes of a probe share, with counters, handles and results, and a barrier
// on it. Every wait on the page throws Stopped when the watchdog sets `stop`.
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

namespace waits {

inline constexpr int kMaxRanks = 16;
inline constexpr int kMostSamples = 2000;
// Counter value that releases every stream that waits for a counter in the page.
inline constexpr Word kReleased = Word{1} << 62;

struct Stopped : std::runtime_error {
  Stopped() : std::runtime_error("stopped by the watchdog") {}
};

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A counter on its own cache lines, so that writes to it do not slow reads of others.
struct alignas(128) RankState {
  std::atomic<Word> value;
};

// The progress of a process, which the watchdog reads at the time limit.
enum Stage : Word { kStarting, kRunning, kBesideBlocked, kFinished };

struct OfRank {
  RankState counter;  // for stream waits
  RankState posted;   // for host waits: the last round whose release is enqueued, or done
  RankState met, stage;
  Handle memory, event;
  Word wrong;
  int samples, batches;  // set by rank 0 for all ranks
  double round[kMostSamples], batch[kMostSamples];
  double values[8];
  char failure[512];
};

struct Page {
  RankState stop;
  OfRank ranks[kMaxRanks];
  std::size_t slot_words;
  std::byte staging_buffers[];  // one staging slot per rank, then the result

  Word* staging_buffer(int rank) {
    return reinterpret_cast<Word*>(staging_buffers) + rank * slot_words;
  }
};

inline std::size_t page_bytes(std::size_t slot_words) {
  constexpr std::size_t kSize = 4096;
  const std::size_t bytes = sizeof(Page) + (kMaxRanks + 1) * slot_words * sizeof(Word);
  return (bytes + kSize - 1) / kSize * kSize;
}

inline Page* new_page(std::size_t slot_words) {
  void* at = mmap(nullptr, page_bytes(slot_words), PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) throw std::runtime_error("mmap: no memory for the shared page");
  Page* const page = new (at) Page;
  page->slot_words = slot_words;
  return page;
}

// The barrier and waits of one rank on the page.
class Rendezvous {
 public:
  Rendezvous(Page& page, int rank, int world) : page_(page), rank_(rank), world_(world) {}

  // Waits until the counter is at least `least`: polls kPatience times, then yields between polls.
  void await(const std::atomic<Word>& counter, Word least) const {
    for (int looks = 0; counter.load(std::memory_order_acquire) < least; ++looks) {
      if (looks > kPatience) sched_yield();
      if (page_.stop.value.load(std::memory_order_relaxed) != 0) throw Stopped();
    }
  }

  // Returns when all ranks have called it. `patient` sleeps between polls, for untimed long waits.
  void all(bool patient = false) {
    page_.ranks[rank_].met.value.store(++met_, std::memory_order_release);
    for (int r = 0; r < world_; ++r) {
      const auto& peer = page_.ranks[r].met.value;
      while (patient && peer.load() < met_ && page_.stop.value.load() == 0)
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      await(peer, met_);
    }
  }

  Page& page() const { return page_; }
  OfRank& mine() const { return page_.ranks[rank_]; }
  OfRank& of(int rank) const { return page_.ranks[rank]; }
  int rank() const { return rank_; }
  int world() const { return world_; }

 private:
  static constexpr int kPatience = 200;
  Page& page_;
  const int rank_, world_;
  Word met_ = 0;
};

}  // namespace waits
