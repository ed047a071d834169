// Table of a level's launch, passed in the kernel's parameters. So nothing is uploaded or kept
// alive, and a CUDA graph captures the table by value.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>

#include "../plan/dtype.h"

namespace pycollect::cuda {

// Bytes of a thread's widest access.
inline constexpr int kPacketBytes = 16;

// Threads per block, and blocks per multiprocessor. With a bound of three blocks, ptxas has the
// registers to issue eight loads before the first add; without a bound, it interleaves them.
inline constexpr int kThreads = 256, kBlocksPerSm = 3;

// One step on the memory of one tensor. A list is an index into the words after the rows:
// addresses, followed by their pitches if `pitched`. A step in place has one list for sources and
// destinations. Units are elements of the kernel's type in a fold, and bytes in a copy.
struct TableRow {
  uint64_t count;        // units of a line
  uint64_t lines;        // number of lines; the units of a line are contiguous
  uint32_t first_block;  // the first block of the grid that works on the row
  uint8_t width;         // bytes of an access, except at the edges; 0: all units are edges
  uint8_t head;          // units before the first access of this width
  uint8_t finishes;      // the last fold of a reduction, which divides averages
  uint8_t pitched;       // more than one line
  uint16_t dsts, srcs, n_dsts, n_srcs;
};
inline constexpr int kRowWords = sizeof(TableRow) / 8;
static_assert(sizeof(TableRow) == 8 * kRowWords);

struct TableHead {
  uint32_t rows = 0;
  int32_t world = 1;      // divisor of averages; 1 for sums
  double inverse = 1;     // 1 / world
  float inverse_f32 = 1;  // stored because narrowing a double costs a thread more than an addition
  Float8Rounding float8 = {};
  uint8_t unused[4] = {};
  // Index of the word that holds the address of the launch's guard. 0: no guard, because the first
  // word always belongs to a row.
  uint16_t guard = 0;
};
static_assert(sizeof(TableHead) == 32);

// Every driver takes 4 KiB of parameters, drivers since CUDA 12.1 take 32,764 bytes. A row of s
// sources and d destinations needs 32 + 8 (s + d) bytes, in place 32 + 8 s. Rows that do not fit go
// into further launches. Rows per launch:
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
using LargeTable = Table<32760>;  // a SmallTable is its beginning
static_assert(sizeof(SmallTable) == 4096 && sizeof(LargeTable) == 32760);

struct RowWords {
  uint64_t at[kRowWords];
};
static_assert(sizeof(RowWords) == sizeof(TableRow));

constexpr TableRow row_at(const uint64_t* words, int row) {
  const uint64_t* at = words + row * kRowWords;
  return std::bit_cast<TableRow>(RowWords{at[0], at[1], at[2], at[3]});
}

}  // namespace pycollect::cuda
