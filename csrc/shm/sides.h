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
    const ChunkOffsets& cut = cut_of(o.where);
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
  const ChunkOffsets& second() const { return cuts_[request_.irregular ? 1 : 0]; }
  const ChunkOffsets& cut_of(Where where) const {
    return where == Where::output ? second() : cuts_[0];
  }
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
  std::array<ChunkOffsets, 2> cuts_;  // irregular: of what it sends, of what it receives; else one
  std::array<Memories, 2> memories_;
};

}  // namespace pycollect::shm
