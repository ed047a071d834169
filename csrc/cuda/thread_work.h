// Which bytes of a launch's rows (see table.h) each GPU thread processes: plain functions, which
// tests also run on the host.
#pragma once
#include <utility>

#include "table.h"

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

// Addresses of one list of a row: in a row of one line, and in one line of a pitched row.
struct Flat {
  const uint64_t* words;
  int n;
  constexpr uint64_t at(int i, int64_t bytes) const { return words[i] + bytes; }
};
struct Pitched {
  const uint64_t* words;
  int n;
  int64_t line;
  constexpr uint64_t at(int i, int64_t bytes) const {
    return words[i] + line * static_cast<int64_t>(words[n + i]) + bytes;
  }
};

// Work of a line, in slots: its wide accesses, then the units before and after these.
struct Line {
  int64_t wide, edges, width, head, unit;  // head: units before the first wide access

  constexpr Line(const TableRow& row, int unit_bytes)
      : wide(0), edges(0), width(row.width), head(row.head), unit(unit_bytes) {
    const auto count = static_cast<int64_t>(row.count);
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

// One thread's share of a row: slots first, first + step, ... of all lines.
struct ThreadShare {
  int64_t first, step;
};

// Position of a thread in the grid.
struct ThreadId {
  uint32_t block, blocks, thread;
};

// Returns the row that a block works on: the last row whose first block is not after it.
constexpr int row_of(const uint64_t* words, int rows, uint32_t block) {
  int low = 0, high = rows - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (row_at(words, middle).first_block <= block)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

// The row of a block, and the share of it of one thread.
struct BlockWork {
  TableRow row;
  ThreadShare share;
  const uint64_t* lists;

  constexpr BlockWork(const TableHead& head, const uint64_t* words, ThreadId id)
      : row(), share(), lists(words + head.rows * kRowWords) {
    const int rows = static_cast<int>(head.rows), index = row_of(words, rows, id.block);
    row = row_at(words, index);
    const uint32_t end = index + 1 < rows ? row_at(words, index + 1).first_block : id.blocks;
    share = {static_cast<int64_t>(id.block - row.first_block) * kThreads + id.thread,
             static_cast<int64_t>(end - row.first_block) * kThreads};
  }
};

// Visits a row of one line, from `slot` on: calls wide(bytes) or edge(bytes), with the distance
// from the line's beginning.
template <class Wide, class Edge>
constexpr void walk_line(const Line& line, int64_t slot, int64_t step, Wide wide, Edge edge) {
  for (; slot < line.wide; slot += step) wide(line.byte_of_wide(slot));
  for (; slot < line.slots(); slot += step) edge(line.byte_of_edge(slot));
}

// Visits a row of several lines: calls one(line, bytes, is_wide). Divides once, not for each slot.
template <class One>
constexpr void walk_lines(const Line& line, uint64_t lines, ThreadShare share, One one) {
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
