// What a level's launch is told, all of it in the kernel's parameters: nothing to upload, nothing
// to keep alive, frozen correctly into a graph. And which thread handles which elements: plain
// functions that the host runs too, so that they are tested without a GPU.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>

#include "../plan/dtype.h"

namespace pycollect::cuda {

// 16 bytes are the widest access that a thread can make.
inline constexpr int kPacketBytes = 16;

// Told that three blocks a multiprocessor are enough, ptxas has the registers to issue eight loads
// before the first add; told nothing, it mixes them.
inline constexpr int kThreads = 256, kBlocksPerSm = 3;

// One step on the memory of one tensor. Lists are indices into the words of the table; a step in
// place has one for both. In a copy the units are bytes.
struct TableRow {
  uint32_t first_block;  // of the grid
  uint32_t lines;        // in each of which the units are contiguous
  uint64_t count;        // units of a line
  uint16_t dsts, srcs;   // of each its addresses, and behind them its pitches if `pitched`
  uint16_t n_dsts, n_srcs;
  uint8_t width;     // bytes of an access, but at the edges; 0: addresses are not alike, all is edge
  uint8_t head;      // units before the first such access
  uint8_t finishes;  // the last fold of a reduction: averages are divided
  uint8_t pitched;   // more than one line
  uint32_t unused = 0;
};
inline constexpr int kRowWords = sizeof(TableRow) / 8;
static_assert(sizeof(TableRow) == 8 * kRowWords);

struct TableHead {
  double inverse = 1;  // of the world's size
  int32_t world = 1;   // 1 unless averages are divided at the end
  uint32_t rows = 0;
  Float8Rounding float8 = {};
  uint16_t unused = 0;
};
static_assert(sizeof(TableHead) == 24);

// Every driver takes 4 KiB of parameters, those of CUDA 12.1 and later 32,764 bytes. A row of s
// sources and d destinations needs 32 + 8 (s + d) bytes, 32 + 8 s in place. More rows than fit are
// more launches.
//    ranks in place   4 KiB    32 KiB
//         2             84       682
//         8             42       341
//        64              7        60
template <std::size_t kBytes>
struct Table {
  static constexpr std::size_t kWords = (kBytes - sizeof(TableHead)) / 8;
  TableHead head;
  uint64_t words[kWords];  // rows, then lists
};
using SmallTable = Table<4096>;
using LargeTable = Table<32760>;  // begins as a small one does
static_assert(sizeof(SmallTable) == 4096 && sizeof(LargeTable) == 32760);

struct RowWords {
  uint64_t at[kRowWords];
};
static_assert(sizeof(RowWords) == sizeof(TableRow));

constexpr TableRow row_at(const uint64_t* words, int row) {
  const uint64_t* at = words + row * kRowWords;
  return std::bit_cast<TableRow>(RowWords{at[0], at[1], at[2], at[3]});
}

// The row that a block works for: the last that begins at or before it.
constexpr int row_of(const uint64_t* words, int rows, uint32_t block) {
  int low = 0, high = rows - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (static_cast<uint32_t>(words[middle * kRowWords]) <= block)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}
static_assert(std::endian::native == std::endian::little);  // first_block is a word's low half

// A line's work, in slots: its wide accesses, then the units before and behind them.
struct Line {
  int64_t wide, edges, head, per_wide;  // per_wide: units

  constexpr Line(const TableRow& row, int unit_bytes)
      : wide(0), edges(0), head(row.head), per_wide(row.width / unit_bytes) {
    const auto count = static_cast<int64_t>(row.count);
    if (per_wide > 0) wide = (count - head) / per_wide;
    edges = count - wide * per_wide;
  }
  constexpr int64_t slots() const { return wide + edges; }
  constexpr int64_t unit_of_wide(int64_t slot) const { return head + slot * per_wide; }
  constexpr int64_t unit_of_edge(int64_t slot) const {
    const int64_t edge = slot - wide;
    return edge < head ? edge : edge + wide * per_wide;
  }
};

// The share of one thread of a row: slots first, first + step, ... of all lines.
struct Share {
  int64_t first, step;
};
constexpr Share share(const TableRow& row, uint32_t end_block, uint32_t block, uint32_t thread) {
  return {static_cast<int64_t>(block - row.first_block) * kThreads + thread,
          static_cast<int64_t>(end_block - row.first_block) * kThreads};
}

}  // namespace pycollect::cuda
