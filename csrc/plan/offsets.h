// Chunk offsets, bound per call: even cuts, uneven chunks and all-to-all-v use the same plan.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include "plan.h"

namespace pycollect {

using Sizes = std::vector<std::size_t>;  // elements per block

// The offsets of the chunks of one buffer: running sums, stored without an allocation if there are
// fewer than kFew chunks.
class ChunkOffsets {
 public:
  // Binds `blocks` blocks of block(i) elements. Each block is cut in whole units of `align`
  // elements, as evenly as possible, and its last chunk gets the remainder. There is no division
  // where a block is one chunk: the divisions would take a tenth of a small call's time.
  template <class Block>
  void bind(int chunks, std::size_t blocks, std::size_t align, Block&& block) {
    chunks_ = chunks;
    if (chunks >= kFew) many_.resize(chunks + 1);
    std::size_t* at = many_.empty() ? few_.data() : many_.data();
    const std::size_t per_block = static_cast<int>(blocks) == chunks ? 1 : chunks / blocks;
    std::size_t start = 0;
    for (std::size_t i = 0; i < blocks; ++i) {
      const std::size_t size = block(i);
      *at++ = start;
      for (std::size_t c = 1; c < per_block; ++c) {
        const std::size_t units = size / align + (size % align != 0);
        *at++ = start + std::min(size, units * c / per_block * align);
      }
      start += size;
    }
    *at = start;
  }
  std::size_t begin(int chunk) const { return at()[chunk]; }
  std::size_t size(int chunk, int n = 1) const { return at()[chunk + n] - at()[chunk]; }
  std::size_t total() const { return at()[chunks_]; }
  std::size_t largest() const {
    std::size_t most = 0;
    for (int c = 0; c < chunks_; ++c) most = std::max(most, size(c));
    return most;
  }

 private:
  static constexpr int kFew = 20;  // enough for one chunk per rank where ranks share a host's cores
  const std::size_t* at() const { return many_.empty() ? few_.data() : many_.data(); }

  int chunks_ = 0;
  std::array<std::size_t, kFew> few_;
  std::vector<std::size_t> many_;
};

// The offsets of all buffers of a plan. Most calls cut all buffers in the same way, which takes no
// allocation if there are few chunks.
class PlanOffsets {
 public:
  // Cuts every buffer in the same way. A plan with more chunks than blocks has several in each
  // block, which begin at multiples of `align` elements within it, to keep vectors whole.
  PlanOffsets(const Plan& plan, std::span<const std::size_t> blocks, std::size_t align = 1);

  // Cuts one buffer of one rank differently. `blocks` contains 0 for a block that it does not have.
  void set(Rank rank, Buffer buffer, const Sizes& blocks);

  std::size_t begin(const Slice& s) const { return of(s).begin(s.first); }
  std::size_t count(const Slice& s) const { return of(s).size(s.first, s.count); }
  std::size_t total(Rank rank, Buffer buffer) const { return of({rank, buffer, 0}).total(); }

  // Checks that the slices of each step agree in size, chunk by chunk. Throws ValueError.
  void check(const Plan& plan) const;

 private:
  static constexpr int kCommon = -1;
  const ChunkOffsets& of(const Slice& s) const {
    if (other_of_.empty()) return common_;
    const int other = other_of_[s.rank * kBuffers + static_cast<int>(s.buffer)];
    return other == kCommon ? common_ : others_[other];
  }
  ChunkOffsets cut(std::span<const std::size_t> blocks) const;

  int world_, chunks_;
  std::size_t align_;
  ChunkOffsets common_;
  std::vector<ChunkOffsets> others_;
  std::vector<int> other_of_;  // [rank][buffer]: index in others_, or kCommon; empty: all kCommon
};

}  // namespace pycollect
