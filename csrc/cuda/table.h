// What a level's launch is told, all of it in the kernel's parameters: nothing to upload, nothing
// to keep alive, frozen correctly into a graph.
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

// One step on the memory of one tensor. Lists are indices into what follows the rows: addresses,
// and behind them their pitches if `pitched`. A step in place has one list for both. In a copy the
// units are bytes.
struct TableRow {
  uint64_t count;        // units of a line
  uint64_t lines;        // in each of which the units are contiguous
  uint32_t first_block;  // of the grid
  uint8_t width;         // bytes of an access, but at the edges; 0: all is edge
  uint8_t head;          // units before the first such access
  uint8_t finishes;      // the last fold of a reduction: averages are divided
  uint8_t pitched;       // more than one line
  uint16_t dsts, srcs, n_dsts, n_srcs;
};
inline constexpr int kRowWords = sizeof(TableRow) / 8;
static_assert(sizeof(TableRow) == 8 * kRowWords);

struct TableHead {
  uint32_t rows = 0;
  int32_t world = 1;      // what averages are divided by: 1 for sums
  double inverse = 1;     // of it
  float inverse_f32 = 1;  // a thread that narrows a double waits longer than for an addition
  Float8Rounding float8 = {};
  uint8_t unused[4] = {};
  // Which of the words is the address of a launch's guard; the first one never is, and says that
  // there is none.
  uint16_t guard = 0;
};
static_assert(sizeof(TableHead) == 32);

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

}  // namespace pycollect::cuda
