// A request's buffers, cut for a plan: where each chunk begins in them, and where in memory that
// is, whatever number of tensors it is spread over.
#pragma once
#include <array>
#include <vector>

#include "executor.h"
#include "script.h"

namespace pycollect::shm {

// A collective that deals in blocks has one a rank, in a side of all blocks or only the own one.
enum class Holds : uint8_t { nothing_in_blocks, all_blocks, own_block };
Holds input_of(Collective collective, bool in_place);
Holds output_of(Collective collective, bool in_place);

// Where chunks begin: running sums, kept without an allocation for few of them.
class Cut {
 public:
  // `blocks` blocks of block(i) elements, each in equal pieces that begin at whole `align`s. No
  // division where there is one piece: they would be a tenth of a small call.
  template <class Block>
  void bind(int chunks, std::size_t blocks, std::size_t align, Block&& block) {
    reserve(chunks);
    const std::size_t pieces = static_cast<int>(blocks) == chunks ? 1 : chunks / blocks;
    std::size_t start = 0, c = 0;
    for (std::size_t i = 0; i < blocks; ++i) {
      const std::size_t size = block(i);
      at_[c++] = start;
      for (std::size_t p = 1; p < pieces; ++p)
        at_[c++] = start + std::min(size, (size + align - 1) / align * p / pieces * align);
      start += size;
    }
    at_[c] = start;
  }
  std::size_t begin(int chunk) const { return at_[chunk]; }
  std::size_t size(int chunk) const { return at_[chunk + 1] - at_[chunk]; }
  std::size_t total() const { return at_[chunks_]; }
  std::size_t largest() const {
    std::size_t most = 0;
    for (int c = 0; c < chunks_; ++c) most = std::max(most, size(c));
    return most;
  }

 private:
  void reserve(int chunks) {
    chunks_ = chunks;
    if (chunks < kFew) return;
    many_.resize(chunks + 1);
    at_ = many_.data();
  }
  static constexpr int kFew = 20;  // one a rank, where ranks share a host's cores
  int chunks_ = 0;
  std::array<std::size_t, kFew> few_;
  std::vector<std::size_t> many_;
  std::size_t* at_ = few_.data();
};

// Elements one after the other, in one piece of memory or in several.
class Memories {
 public:
  void bind(const Side& side, std::size_t item);
  bool whole() const { return ends_.empty(); }
  std::byte* base() const { return base_; }
  struct Piece {
    std::byte* at;
    std::size_t count;  // elements from there to the end of the span
  };
  Piece find(std::size_t element) const;

 private:
  const Side* side_ = nullptr;
  std::size_t item_ = 1;
  std::byte* base_ = nullptr;
  std::vector<std::size_t> ends_ = {};  // [span], where there are several
};

// What a rank was asked for, checked, and cut for one script.
class Sides {
 public:
  Sides(const Request& request, Rank rank, int world);
  Sides(const Sides&) = delete;
  Sides& operator=(const Sides&) = delete;

  // Of all ranks' blocks together; 0 where a rank cannot know that.
  std::size_t elements() const { return elements_; }
  void cut(int chunks);

  std::size_t size(const Move& m) const { return cut_of(m.like).size(m.chunk); }
  std::size_t largest() const { return std::max(cuts_[0].largest(), second().largest()); }
  // Where a chunk of a rank's buffer begins, in elements.
  std::size_t begin(const Operand& o) const {
    const Cut& cut = cut_of(o.where);
    const bool own = (o.where == Where::input ? input_ : output_) == Holds::own_block;
    return cut.begin(o.index) - (own ? cut.begin(o.rank * per_block_) : 0);
  }
  const Memories& memory(Where where) const {
    return where == Where::output && !request_.in_place ? memories_[1] : memories_[0];
  }
  std::size_t bytes(Where where) const {
    return total(where == Where::output && !request_.in_place ? request_.output : request_.input) *
           item_;
  }
  std::size_t item() const { return item_; }
  std::size_t total(const Side& side) const;

 private:
  const Cut& second() const { return cuts_[request_.irregular ? 1 : 0]; }
  const Cut& cut_of(Where where) const { return where == Where::output ? second() : cuts_[0]; }
  void check() const;
  void check(const char* what, const Side& side, Holds holds) const;
  std::size_t block(const Side& side, Holds holds, std::size_t i) const;
  const Side& known() const;

  const Request& request_;
  const Rank rank_;
  const int world_;
  const std::size_t item_;
  const Holds input_, output_;
  std::size_t elements_ = 0;
  int per_block_ = 1;
  std::array<Cut, 2>
      cuts_;  // regular: one for all; otherwise one of what it sends and one of the rest
  std::array<Memories, 2> memories_;
};

}  // namespace pycollect::shm
