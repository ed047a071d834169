// Where chunks begin, bound per call: even cuts, uneven chunks and all-to-all-v are the same plan.
#pragma once
#include <cstddef>
#include <vector>

#include "plan.h"

namespace pycollect {

using Sizes = std::vector<std::size_t>;  // elements per block

class Offsets {
 public:
  // Every buffer alike. A plan with more chunks than blocks cuts each block into pieces, which
  // begin at multiples of `align` elements within their block, so that vectors stay whole.
  Offsets(const Plan& plan, const Sizes& blocks, std::size_t align = 1);

  // One buffer of one rank; zeros where it has no such block.
  void set(Rank rank, Buffer buffer, const Sizes& blocks);

  std::size_t begin(const Slice& s) const { return of(s)[s.first]; }
  std::size_t count(const Slice& s) const { return of(s)[s.first + s.count] - of(s)[s.first]; }
  std::size_t total(Rank rank, Buffer buffer) const { return of({rank, buffer, 0})[chunks_]; }

  // What all slices of a step must agree on, chunk by chunk. Throws ValueError.
  void check(const Plan& plan) const;

 private:
  const Sizes& of(const Slice& s) const {
    return rows_[row_of_[s.rank * kBuffers + static_cast<int>(s.buffer)]];
  }
  Sizes row(const Sizes& blocks) const;

  int chunks_;
  std::size_t align_;
  std::vector<int> row_of_;  // [rank][buffer]
  std::vector<Sizes> rows_;
};

}  // namespace pycollect
