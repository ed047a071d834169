// A plan is the list of copies and folds of a collective. It is written as if one thread ran the
// whole world, so it cannot contain a race; `lower` finds the waits that preserve this on several
// ranks. No pointers, types, sizes or streams.
#pragma once
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

namespace pycollect {

using Rank = int;
// `host` is memory of the rank's host, which every rank reaches. Plans are written without it;
// `stage` adds it where ranks do not reach each other.
enum class Buffer : uint8_t { input, output, scratch, host };
inline constexpr int kBuffers = 4;
inline constexpr std::array<const char*, kBuffers> kBufferNames{"in", "out", "tmp", "host"};

// Chunks [first, first + count) of one buffer of one rank. `PlanOffsets` binds the number of
// elements of a chunk per call.
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
  Rank by = kFirstDestination;  // the rank that runs it: a destination's (pull), a source's (push)
  Rank owner() const { return by == kFirstDestination ? dsts.front().rank : by; }
};

struct Plan {
  int world;
  int chunks;  // per buffer; some chunks are empty in a buffer that has fewer
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

// A cell is one chunk of one buffer of one rank. `each_cell` visits those that a slice covers. In
// place, the cells of a rank's output are those of its input.
inline int cells(const Plan& p) { return p.world * kBuffers * p.chunks; }
template <class F>
void each_cell(const Plan& p, bool in_place, const Slice& s, F&& f) {
  const int buffer = in_place && s.buffer == Buffer::output ? 0 : static_cast<int>(s.buffer);
  const int base = (s.rank * kBuffers + buffer) * p.chunks + s.first;
  for (int i = 0; i < s.count; ++i) f(base + i);
}

inline int first_cell(const Plan& p, bool in_place, const Slice& s) {
  int at = 0;
  each_cell(p, in_place, {s.rank, s.buffer, s.first}, [&](int c) { at = c; });
  return at;
}

// Throws ValueError for a slice outside the world or its buffer, a step without sources or
// destinations, slices of one step of different widths, and a source that overlaps a destination of
// its step without being the same slice.
void check(const Plan& plan, bool in_place);

}  // namespace pycollect
