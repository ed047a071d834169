// Divides the tasks of a kernel (see kernel_args.h) among the blocks and threads of the grid: tells
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

// The destinations or sources of a task of one row: `words` holds their `n` addresses.
struct FlatAddresses {
  const uint64_t* words;
  int n;
  constexpr uint64_t at(int i, int64_t bytes) const { return words[i] + bytes; }
};
// The destinations or sources of a task of several rows, in row number `row`: `words` holds the
// `n` addresses in the first row, then the `n` pitches.
struct PitchedAddresses {
  const uint64_t* words;
  int n;
  int64_t row;
  constexpr uint64_t at(int i, int64_t bytes) const {
    return words[i] + row * static_cast<int64_t>(words[n + i]) + bytes;
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

// The accesses of a row, numbered: first the wide ones, then the edges, which are accesses of a
// single unit before and after the wide ones.
struct RowAccesses {
  int64_t wide, edges;  // number of accesses
  int64_t wide_bytes;   // bytes of all wide accesses together
  int64_t head;         // number of edges before the first wide access
  int64_t unit;         // bytes of an edge

  // `bytes` of a wide access; if the task's accesses are narrower, the wide ones are striped.
  constexpr RowAccesses(const TaskArgs& task, int64_t bytes, int unit_bytes)
      : wide(0), edges(0), wide_bytes(0), head(task.head), unit(unit_bytes) {
    const auto count = static_cast<int64_t>(task.count);
    if (task.width > 0) wide = (count - head) * unit / bytes;
    if (task.width < bytes) wide -= wide % kWarp;
    wide_bytes = wide * bytes;
    edges = count - wide_bytes / unit;
  }
  constexpr int64_t size() const { return wide + edges; }
  template <class V>
  constexpr int64_t byte_of_wide(int64_t access) const {
    int64_t byte = head * unit + access * static_cast<int64_t>(sizeof(V));
    if constexpr (is_striped<V>)
      byte -= access % kWarp * static_cast<int64_t>(sizeof(V) - sizeof(typename V::Word));
    return byte;
  }
  constexpr int64_t byte_of_edge(int64_t access) const {
    const int64_t edge = access - wide;
    return edge * unit + (edge < head ? 0 : wide_bytes);
  }
};

// One thread's share of a task: accesses first, first + step, ..., numbered through all rows.
struct ThreadShare {
  int64_t first, step;
};

// Position of a thread in the grid: its block, the number of blocks, and its index in the block.
struct ThreadId {
  uint32_t block, blocks, thread;
};

// Returns the index of the task that a block runs: the last task with first_block <= block.
constexpr int task_of(const uint64_t* words, int tasks, uint32_t block) {
  int low = 0, high = tasks - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (task_at(words, middle).first_block <= block)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

// The task that a block runs, one thread's share of it, and the lists of all tasks of the kernel.
struct BlockTask {
  TaskArgs task;
  ThreadShare share;
  const uint64_t* lists;

  constexpr BlockTask(const ArgsHead& head, const uint64_t* words, ThreadId id)
      : task(), share(), lists(words + head.tasks * kTaskWords) {
    const int tasks = static_cast<int>(head.tasks), index = task_of(words, tasks, id.block);
    task = task_at(words, index);
    const uint32_t end = index + 1 < tasks ? task_at(words, index + 1).first_block : id.blocks;
    share = {static_cast<int64_t>(id.block - task.first_block) * kThreads + id.thread,
             static_cast<int64_t>(end - task.first_block) * kThreads};
  }
};

// Visits a thread's accesses to a task of several rows: calls one(number of the row, access).
// Divides by the accesses of a row before the loop, and not for each one.
template <class One>
constexpr void walk_rows(const RowAccesses& row, uint64_t rows, ThreadShare share, One one) {
  const int64_t accesses = row.size();
  const int64_t more_rows = share.step / accesses, more_accesses = share.step % accesses;
  int64_t at = share.first / accesses, access = share.first % accesses;
  while (at < static_cast<int64_t>(rows)) {
    one(at, access);
    at += more_rows;
    access += more_accesses;
    if (access >= accesses) {
      access -= accesses;
      ++at;
    }
  }
}

}  // namespace pycollect::cuda
