// A plan says what moves where. It is written as if one thread ran the whole world, so a plan
// cannot contain a race; `lower` finds the waits that keep it that way. No pointers, types, sizes
// or streams.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

namespace pycollect {

using Rank = int;
// `host` is memory of the rank's host that everybody reaches: plans are written without it, `stage`
// puts it in where ranks do not reach each other.
enum class Buffer : uint8_t { input, output, scratch, host };
inline constexpr int kBuffers = 4;

// Chunks [first, first + count) of one buffer of one rank. How many elements a chunk has is not
// known here: `Offsets` binds that per call.
struct Slice {
  Rank rank;
  Buffer buffer;
  int first;
  int count = 1;
  bool operator==(const Slice&) const = default;
};
using Slices = std::vector<Slice>;

// Every dst = srcs[0] op srcs[1] op ...; a copy when there is one source. A dst and a src may be
// the same slice (an element is read before it is written) but must not overlap otherwise.
struct Step {
  static constexpr Rank kFirstDestination = -1;
  Slices dsts, srcs;
  Rank by = kFirstDestination;  // a pull, unless the source's rank is named: a push
  Rank owner() const { return by == kFirstDestination ? dsts.front().rank : by; }
};

struct Plan {
  int world;
  int chunks;  // per buffer; a buffer that has fewer leaves some of them empty
  std::vector<Step> steps = {};

  void fold(Slices dsts, Slices srcs, Rank by = Step::kFirstDestination) {
    steps.push_back({std::move(dsts), std::move(srcs), by});
  }
  void copy(Slice dst, Slice src) { fold({dst}, {src}); }
};

inline Slice in(Rank r, int chunk, int count = 1) { return {r, Buffer::input, chunk, count}; }
inline Slice out(Rank r, int chunk, int count = 1) { return {r, Buffer::output, chunk, count}; }
inline Slice tmp(Rank r, int chunk, int count = 1) { return {r, Buffer::scratch, chunk, count}; }
inline Slice host(Rank r, int chunk, int count = 1) { return {r, Buffer::host, chunk, count}; }

// The same chunks on every rank, in rank order.
inline Slices everyone(Slice s, int world) {
  Slices all;
  all.reserve(world);
  for (s.rank = 0; s.rank < world; ++s.rank) all.push_back(s);
  return all;
}

// The cells of memory that a slice covers. In place, a rank's output is its input.
inline int cells(const Plan& p) { return p.world * kBuffers * p.chunks; }
template <class F>
void each_cell(const Plan& p, bool in_place, const Slice& s, F&& f) {
  const int buffer = in_place && s.buffer == Buffer::output ? 0 : static_cast<int>(s.buffer);
  const int base = (s.rank * kBuffers + buffer) * p.chunks + s.first;
  for (int i = 0; i < s.count; ++i) f(base + i);
}

// Throws ValueError for a slice that is not there, an empty side, sides of unlike width, or a
// source and a destination of one step that overlap without being the same.
void check(const Plan& plan, bool in_place);

}  // namespace pycollect
