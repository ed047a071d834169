// A request's call buffers, divided into a plan's chunks: where each chunk begins, and its address
// in memory, also if the buffer consists of several tensors.
#pragma once
#include <array>
#include <vector>

#include "executor.h"
#include "rank_program.h"

namespace pycollect::ipc {

// Blocks of a call buffer. A block-wise collective has one block per rank; a call buffer holds all
// of them or only this rank's own.
enum class BlockContent : uint8_t { nothing_in_blocks, all_blocks, own_block };
BlockContent input_of(Collective collective, bool in_place);
BlockContent output_of(Collective collective, bool in_place);

// The elements of one call buffer in order, in one buffer segment or several (IoVec).
class SegmentList {
 public:
  void bind(const CallBuffer& buffer, std::size_t item);
  bool is_contiguous() const { return ends_.empty(); }
  std::byte* base() const { return base_; }
  struct SegmentPosition {
    std::byte* at;
    std::size_t count;  // elements from there to the end of the buffer segment
  };
  SegmentPosition find(std::size_t element) const;

 private:
  const CallBuffer* buffer_ = nullptr;
  std::size_t item_ = 1;
  std::byte* base_ = nullptr;
  std::vector<std::size_t> ends_ = {};  // [buffer segment], if there are several
};

// The checked call buffers of one rank's request, divided for one rank program.
class CallBuffers {
 public:
  CallBuffers(const CollectiveRequest& request, Rank rank, int world);
  CallBuffers(const CallBuffers&) = delete;
  CallBuffers& operator=(const CallBuffers&) = delete;

  // Number of elements of all ranks' blocks; 0 if this rank cannot compute it (irregular).
  std::size_t elements() const { return elements_; }
  void divide(int chunks);

  std::size_t size(const Instruction& m) const { return offsets_of(m.sized_by).size(m.chunk); }
  std::size_t largest() const { return std::max(offsets_[0].largest(), second().largest()); }
  // Index of the element of the rank's buffer at which the operand's chunk begins.
  std::size_t begin(const Operand& o) const {
    const ChunkOffsets& offsets = offsets_of(o.where);
    const bool own =
        (o.where == OperandBuffer::input ? input_ : output_) == BlockContent::own_block;
    return offsets.begin(o.index) - (own ? offsets.begin(o.rank * per_block_) : 0);
  }
  const SegmentList& memory(OperandBuffer where) const {
    return where == OperandBuffer::output && !request_.in_place ? memories_[1] : memories_[0];
  }
  std::size_t bytes(OperandBuffer where) const {
    return total(where == OperandBuffer::output && !request_.in_place ? request_.output
                                                                      : request_.input) *
           item_;
  }
  std::size_t item() const { return item_; }
  std::size_t accumulator_item() const { return item_bytes(accumulator(request_.dtype)); }
  std::size_t widening() const { return accumulator_item() / item_; }
  std::size_t total(const CallBuffer& buffer) const;

 private:
  const ChunkOffsets& second() const { return offsets_[request_.irregular ? 1 : 0]; }
  const ChunkOffsets& offsets_of(OperandBuffer where) const {
    return where == OperandBuffer::output ? second() : offsets_[0];
  }
  void check() const;
  void check(const char* what, const CallBuffer& buffer, BlockContent holds) const;
  std::size_t block(const CallBuffer& buffer, BlockContent holds, std::size_t i) const;
  const CallBuffer& known() const;

  const CollectiveRequest& request_;
  const Rank rank_;
  const int world_;
  const std::size_t item_;
  const BlockContent input_, output_;
  std::size_t elements_ = 0;
  int per_block_ = 1;
  std::array<ChunkOffsets, 2> offsets_;  // irregular: input's and output's; else one for both
  std::array<SegmentList, 2> memories_;
};

}  // namespace pycollect::ipc
