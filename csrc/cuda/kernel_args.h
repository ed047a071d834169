// The parameters of the kernels, passed by value: the kernel tasks of one kernel launch, with
// the addresses that they read and write. Nothing is uploaded or kept alive, and a CUDA graph
// captures all of it.
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

// A KernelTask as the kernel reads it. Its destinations and its sources are two lists in the words
// after all TaskArgs: addresses, followed by their pitches if `pitched`. `dsts` and `srcs` are the
// indices at which the lists begin; in place, both are the same list. A unit is an element of the
// kernel's type in a fold, and a byte in a copy.
struct TaskArgs {
  uint64_t count;        // number of units of a row, which are contiguous
  uint64_t rows;         // number of rows
  uint32_t first_block;  // the first block of the grid that runs this task
  uint8_t width;         // bytes of an access (a fold's: 16 or a unit); 0: all units are edges
  uint8_t head;          // units before the first wide access
  uint8_t finishes;      // whether the fold completes the reduction, and divides averages
  uint8_t pitched;       // whether there is more than one row
  uint16_t dsts, srcs, n_dsts, n_srcs;
};
inline constexpr int kTaskWords = sizeof(TaskArgs) / 8;
static_assert(sizeof(TaskArgs) == 8 * kTaskWords);

struct ArgsHead {
  uint32_t tasks = 0;
  int32_t world = 1;      // divisor of averages; 1 for sums
  double inverse = 1;     // 1 / world
  float inverse_f32 = 1;  // stored because narrowing a double costs a thread more than an addition
  Float8Specials float8 = {};
  uint8_t unused[6] = {};
};
static_assert(sizeof(ArgsHead) == 32);

// The parameters of every kernel, 4 KiB, which all drivers take and a launch copies. A task of s
// sources and d destinations needs 32 + 8 (s + d) bytes, in place 32 + 8 s; twice the 8 bytes if
// pitched. Tasks that do not fit go into further kernel launches. One holds 84 tasks of 2 ranks
// in place, 42 of 8 ranks, and 7 of 64.
struct KernelArgs {
  static constexpr std::size_t kWords = (4096 - sizeof(ArgsHead)) / 8;
  ArgsHead head;
  uint64_t words[kWords];  // a TaskArgs for each task, then the lists
};
static_assert(sizeof(KernelArgs) == 4096);

struct TaskWords {
  uint64_t at[kTaskWords];
};
static_assert(sizeof(TaskWords) == sizeof(TaskArgs));

constexpr TaskArgs task_at(const uint64_t* words, int task) {
  const uint64_t* at = words + task * kTaskWords;
  return std::bit_cast<TaskArgs>(TaskWords{at[0], at[1], at[2], at[3]});
}

}  // namespace pycollect::cuda
