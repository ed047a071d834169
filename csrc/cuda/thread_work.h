// Divides the works of a kernel (see kernel_args.h) among the blocks and threads of the grid: tells
// each thread which bytes to read and write. The functions are constexpr, for tests on the host.
#pragma once
#include <utility>

#include "kernel_args.h"

namespace pycollect::cuda {

// A thread's widest access.
struct alignas(kPacketBytes) Packet {
  uint32_t words[kPacketBytes / 4];
};

// Number of loads that a thread has in flight, if its share has that many. Fewer would not hide the
// latency of memory in a fold of two sources; more would take registers from other blocks.
inline constexpr int kInFlight = 8;

// Calls body(0), body(1), ... with compile-time constants, so that arrays stay in registers.
template <int n, class Body>
constexpr void each(Body body) {
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (body(std::integral_constant<int, i>{}), ...);
  }(std::make_integer_sequence<int, n>{});
}

// The destinations or sources of a work of one line: `words` holds their `n` addresses.
struct FlatAddresses {
  const uint64_t* words;
  int n;
  constexpr uint64_t at(int i, int64_t bytes) const { return words[i] + bytes; }
};
// The destinations or sources of a work of several lines, in line number `line`: `words` holds the
// `n` addresses in the first line, then the `n` pitches.
struct PitchedAddresses {
  const uint64_t* words;
  int n;
  int64_t line;
  constexpr uint64_t at(int i, int64_t bytes) const {
    return words[i] + line * static_cast<int64_t>(words[n + i]) + bytes;
  }
};

// Threads of a warp. The device joins their accesses to neighbouring addresses.
inline constexpr int kWarp = 32;

// Bytes of the largest units that a fold accesses as striped packets. With larger ones, the loads
// of single units keep enough bytes in flight.
inline constexpr int kMaxStripedBytes = 4;

// A packet of a fold whose addresses differ modulo 16 bytes: several accesses of one unit,
// `kStride` bytes apart, so that a thread has as many bytes in flight as a register each allows.
// The packets of a warp are interleaved: its threads access neighbouring units, and its packets
// together are contiguous.
template <class W>
struct Striped {
  using Word = W;
  static constexpr int kWords = kPacketBytes / sizeof(W), kStride = kWarp * sizeof(W);
  W words[kWords];
};
template <class V>
inline constexpr bool is_striped = false;
template <class W>
inline constexpr bool is_striped<Striped<W>> = true;

// The accesses of a line, numbered as slots: first the wide accesses, then the edges, which are
// accesses of a single unit before and after the wide ones.
struct LineAccesses {
  int64_t wide, edges;  // number of accesses
  int64_t wide_bytes;   // bytes of all wide accesses together
  int64_t head;         // number of edges before the first wide access
  int64_t unit;         // bytes of an edge

  // `bytes` of a wide access; if the work's accesses are narrower, the wide ones are striped.
  constexpr LineAccesses(const WorkArgs& work, int64_t bytes, int unit_bytes)
      : wide(0), edges(0), wide_bytes(0), head(work.head), unit(unit_bytes) {
    const auto count = static_cast<int64_t>(work.count);
    if (work.width > 0) wide = (count - head) * unit / bytes;
    if (work.width < bytes) wide -= wide % kWarp;
    wide_bytes = wide * bytes;
    edges = count - wide_bytes / unit;
  }
  constexpr int64_t slots() const { return wide + edges; }
  template <class V>
  constexpr int64_t byte_of_wide(int64_t slot) const {
    int64_t byte = head * unit + slot * static_cast<int64_t>(sizeof(V));
    if constexpr (is_striped<V>)
      byte -= slot % kWarp * static_cast<int64_t>(sizeof(V) - sizeof(typename V::Word));
    return byte;
  }
  constexpr int64_t byte_of_edge(int64_t slot) const {
    const int64_t edge = slot - wide;
    return edge * unit + (edge < head ? 0 : wide_bytes);
  }
};

// One thread's share of a work: the slots first, first + step, ..., numbered through all lines.
struct ThreadShare {
  int64_t first, step;
};

// Position of a thread in the grid: its block, the number of blocks, and its index in the block.
struct ThreadId {
  uint32_t block, blocks, thread;
};

// Returns the index of the work that a block runs: the last work with first_block <= block.
constexpr int work_of(const uint64_t* words, int works, uint32_t block) {
  int low = 0, high = works - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (work_at(words, middle).first_block <= block)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

// The work that a block runs, one thread's share of it, and the lists of all works of the kernel.
struct BlockWork {
  WorkArgs work;
  ThreadShare share;
  const uint64_t* lists;

  constexpr BlockWork(const ArgsHead& head, const uint64_t* words, ThreadId id)
      : work(), share(), lists(words + head.works * kWorkWords) {
    const int works = static_cast<int>(head.works), index = work_of(words, works, id.block);
    work = work_at(words, index);
    const uint32_t end = index + 1 < works ? work_at(words, index + 1).first_block : id.blocks;
    share = {static_cast<int64_t>(id.block - work.first_block) * kThreads + id.thread,
             static_cast<int64_t>(end - work.first_block) * kThreads};
  }
};

// Visits a thread's slots of a work of several lines: calls one(line, slot). Divides by the slots
// of a line before the loop, and not for each slot.
template <class One>
constexpr void walk_lines(const LineAccesses& line, uint64_t lines, ThreadShare share, One one) {
  const int64_t slots = line.slots();
  const int64_t more_lines = share.step / slots, more_slots = share.step % slots;
  int64_t at = share.first / slots, slot = share.first % slots;
  while (at < static_cast<int64_t>(lines)) {
    one(at, slot);
    at += more_lines;
    slot += more_slots;
    if (slot >= slots) {
      slot -= slots;
      ++at;
    }
  }
}

}  // namespace pycollect::cuda
