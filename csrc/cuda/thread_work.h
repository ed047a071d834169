// Which bytes of a kernel's works (see kernel_args.h) each GPU thread processes: plain functions,
// which tests also run on the host.
#pragma once
#include <utility>

#include "kernel_args.h"

namespace pycollect::cuda {

// A thread's widest access.
struct alignas(kPacketBytes) Packet {
  uint32_t words[kPacketBytes / 4];
};

// 16-byte loads that a thread has in flight, if it has that many. Fewer do not hide the latency of
// memory when there are two sources; more need registers that other blocks could use.
inline constexpr int kInFlight = 8;

// Calls body(0), body(1), ... with compile-time constants, so that arrays stay in registers.
template <int n, class Body>
constexpr void each(Body body) {
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (body(std::integral_constant<int, i>{}), ...);
  }(std::make_integer_sequence<int, n>{});
}

// The addresses in one list of a WorkArgs, for work of a single line. `words` begins with them.
struct FlatAddresses {
  const uint64_t* words;
  int n;
  constexpr uint64_t at(int i, int64_t bytes) const { return words[i] + bytes; }
};
// The same for line number `line` of pitched work; the pitches follow the `n` addresses.
struct PitchedAddresses {
  const uint64_t* words;
  int n;
  int64_t line;
  constexpr uint64_t at(int i, int64_t bytes) const {
    return words[i] + line * static_cast<int64_t>(words[n + i]) + bytes;
  }
};

// The accesses of a line, numbered as slots: the wide ones, then those of single units before and
// after them.
struct LineAccesses {
  int64_t wide, edges, width, head, unit;  // head: units before the first wide access

  constexpr LineAccesses(const WorkArgs& work, int unit_bytes)
      : wide(0), edges(0), width(work.width), head(work.head), unit(unit_bytes) {
    const auto count = static_cast<int64_t>(work.count);
    if (width > 0) wide = (count - head) * unit / width;
    edges = count - wide * width / unit;
  }
  constexpr int64_t slots() const { return wide + edges; }
  constexpr int64_t byte_of_wide(int64_t slot) const { return head * unit + slot * width; }
  constexpr int64_t byte_of_edge(int64_t slot) const {
    const int64_t edge = slot - wide;
    return edge * unit + (edge < head ? 0 : wide * width);
  }
};

// One thread's share of a work: slots first, first + step, ... of all lines.
struct ThreadShare {
  int64_t first, step;
};

// Position of a thread in the grid.
struct ThreadId {
  uint32_t block, blocks, thread;
};

// Returns the index of the work that a block runs: the last whose first block is not after it.
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

// The work of a block, and the share of it of one thread.
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

// Visits work of one line, from `slot` on: calls wide(bytes) or edge(bytes), with the distance
// from the line's beginning.
template <class Wide, class Edge>
constexpr void walk_line(const LineAccesses& line, int64_t slot, int64_t step, Wide wide,
                         Edge edge) {
  for (; slot < line.wide; slot += step) wide(line.byte_of_wide(slot));
  for (; slot < line.slots(); slot += step) edge(line.byte_of_edge(slot));
}

// Visits work of several lines: calls one(line, bytes, is_wide). Divides once, not for each slot.
template <class One>
constexpr void walk_lines(const LineAccesses& line, uint64_t lines, ThreadShare share, One one) {
  const int64_t slots = line.slots();
  const int64_t more_lines = share.step / slots, more_slots = share.step % slots;
  int64_t at = share.first / slots, slot = share.first % slots;
  while (at < static_cast<int64_t>(lines)) {
    const bool wide = slot < line.wide;
    one(at, wide ? line.byte_of_wide(slot) : line.byte_of_edge(slot), wide);
    at += more_lines;
    slot += more_slots;
    if (slot >= slots) {
      slot -= slots;
      ++at;
    }
  }
}

}  // namespace pycollect::cuda
