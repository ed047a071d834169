// What the processes of a probe share: a page of counters, handles and results, and how they meet
// in it. Whoever waits here ends when the watchdog says stop.
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

inline constexpr int kMostRanks = 16;
inline constexpr int kMostSamples = 2000;
// What releases every stream that waits for a counter in here, whatever it waits for.
inline constexpr Word kReleased = Word{1} << 62;

struct Stopped : std::runtime_error {
  Stopped() : std::runtime_error("stopped by the watchdog") {}
};

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Nobody's writing slows another's reading.
struct alignas(128) Line {
  std::atomic<Word> value;
};

// How far a process came; the watchdog asks when time is up.
enum Stage : Word { kStarting, kRunning, kBesideBlocked, kFinished };

struct OfRank {
  Line counter;  // for streams
  Line posted;   // for hosts: the round whose release is on the stream, or done
  Line met, stage;
  Handle memory, event;
  Word wrong;
  int samples, batches;  // of rank 0: what all have
  double round[kMostSamples], batch[kMostSamples];
  double values[8];
  char failure[512];
};

struct Page {
  Line stop;
  OfRank ranks[kMostRanks];
  std::size_t slot_words;
  std::byte slots[];  // of the ranks, then the result

  Word* slot(int rank) { return reinterpret_cast<Word*>(slots) + rank * slot_words; }
};

inline std::size_t page_bytes(std::size_t slot_words) {
  constexpr std::size_t kSize = 4096;
  const std::size_t bytes = sizeof(Page) + (kMostRanks + 1) * slot_words * sizeof(Word);
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

// One rank's end of the page.
class Meeting {
 public:
  Meeting(Page& page, int rank, int world) : page_(page), rank_(rank), world_(world) {}

  // Until the counter has come so far. Looks often, then lets others have the core.
  void await(const std::atomic<Word>& counter, Word least) const {
    for (int looks = 0; counter.load(std::memory_order_acquire) < least; ++looks) {
      if (looks > kPatience) sched_yield();
      if (page_.stop.value.load(std::memory_order_relaxed) != 0) throw Stopped();
    }
  }

  // Returns when all ranks have come. `patient`: it may take long, and nobody is timed.
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
