// What a group's ranks know of each other's GPUs, in the memory that they share and that their
// streams read and write. Every word has one writer, but for a counter whose stream will not come
// to it: who gives up waiting moves that on. All zeros is the state to begin with.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "../shm/layout.h"
#include "gpu.h"

namespace pycollect::slabs {

// How far a rank's stream is: shm::Line's `done`, but of what its GPU has done. On a line of its
// own, which only streams and who looks at them touch.
struct alignas(128) Counter {
  std::atomic<uint64_t> reached{0};
};
static_assert(sizeof(Counter) == 128);

// What came of one station of the ranks' meeting (see meeting.h).
struct Verdict {
  bool fine = false;
  std::array<char, 239> why = {};
};

struct alignas(128) Berth {
  // How far it is in what it has handed to its stream: nobody's stream waits for what is beyond.
  std::atomic<uint64_t> enqueued{0};
  std::atomic<uint64_t> stations{0};     // that the rank has come to
  std::array<Verdict, 2> verdicts = {};  // [station & 1]; written before `stations`
  Handle handle = {};                    // of its slab
  std::array<char, 64> gpu = {};         // that the slab is on
};

// A rank's word of memory beside its slab that the others may open (see tracts.h).
struct alignas(64) Notice {
  std::atomic<uint64_t> bytes{0};    // 0: it is not up; written after the handle
  std::atomic<uint64_t> openers{0};  // a bit for each rank that has it open, or is about to
  Handle handle = {};
};
// Of each rank: a bit each in a word. torch's allocator asks for 20 MiB and more at once, or 2.
inline constexpr int kMostTracts = 64;

class Deck {
 public:
  Deck(std::byte* base, int world) : base_(base), world_(world) {}
  static constexpr std::size_t bytes(int world) {
    return shm::Layout::up(sizeof(Counter) * (1 + world)) +
           world * (sizeof(Berth) + kMostTracts * sizeof(Notice));
  }

  // Not zero: results are no longer written (see Launch::guard).
  std::atomic<uint32_t>& aborted() const {
    return *reinterpret_cast<std::atomic<uint32_t>*>(base_);
  }
  Counter& counter(Rank r) const { return reinterpret_cast<Counter*>(base_)[1 + r]; }
  Berth& berth(Rank r) const {
    return reinterpret_cast<Berth*>(base_ + shm::Layout::up(counter_bytes()))[r];
  }
  Notice& notice(Rank r, int number) const {
    std::byte* const first = base_ + shm::Layout::up(counter_bytes()) + world_ * sizeof(Berth);
    return reinterpret_cast<Notice*>(first)[r * kMostTracts + number];
  }
  // The part that devices touch: whole pages from the beginning.
  std::byte* base() const { return base_; }
  std::size_t adopted_bytes() const { return shm::Layout::up(counter_bytes()); }
  std::size_t offset(Rank r) const { return sizeof(Counter) * (1 + r); }

 private:
  std::size_t counter_bytes() const { return sizeof(Counter) * (1 + world_); }
  std::byte* base_;
  int world_;
};

}  // namespace pycollect::slabs
