// A collective of one rank on tensors of one dtype, as it is passed to the executor.
#pragma once
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "../plan/offsets.h"
#include "../plan/registry.h"

namespace pycollect::ipc {

// A rank's position in its group.
struct RankAndWorld {
  Rank rank;
  int world;
};

struct BufferSpan {
  std::byte* base;
  std::size_t count;  // elements
};

// Input or output buffer of this rank: the elements of the spans, one after the other, cut into
// blocks for the plan's chunks. A buffer that holds the blocks of all ranks (all_gather's
// output) has one per rank; any other (all_gather's input, both buffers of all_reduce) has one
// block. Spans and sizes must live until the call has ended.
struct CallBuffer {
  std::span<const BufferSpan> spans = {};
  std::span<const std::size_t> blocks = {};
  // Fingerprint of where tensors end within the blocks; 0 if each block is one tensor or empty.
  uint64_t cuts = 0;
};
inline std::size_t total(const CallBuffer& buffer) {
  return std::reduce(buffer.blocks.begin(), buffer.blocks.end());
}

// What a CallBuffer refers to, where nothing else has it.
struct CallBufferMemory {
  std::vector<BufferSpan> spans = {};
  Sizes blocks = {};
  CallBuffer view() const { return {spans, blocks}; }
};

// The tensors of a sparse all_reduce, whose entries the ranks exchange with all_gather. Ranks agree
// on these tensors, and messages name them, in place of the bytes that move.
struct SparseForm {
  DType dtype;
  ReduceOp op;
  uint64_t elements;  // of the dense shapes
  uint64_t shapes;    // hash of all that must agree
};

struct CollectiveRequest {
  Collective collective;
  DType dtype = DType::u8;
  // Index in kAllDTypeNames of the tensors' dtype, which may differ if data only moves; 0: `dtype`.
  uint8_t moved_dtype = 0;
  ReduceOp op = ReduceOp::sum;
  Rank root = 0;
  std::string_view algorithm = {};  // empty: the selector chooses
  FoldOptions options = {};
  // True if the input is also the output; `output` is then empty. Must be the same on all ranks.
  // It may be false although this rank's own block lies within the other buffer.
  bool in_place = false;
  // A buffer that the collective does not use on this rank is empty.
  CallBuffer input = {}, output = {};
  // True if only the two ends of a transfer know its block size (all_to_all with split sizes,
  // gather and scatter of unequal parts). Must be the same on all ranks.
  bool irregular = false;
  // Number of the caller's tensors; must be the same on all ranks. 0: no data moves, the ranks only
  // agree on the call.
  uint64_t tensors = 1;
  const SparseForm* sparse = nullptr;  // set in a request that is part of a sparse all_reduce
  // The user's call, and its number, if this is a part of it.
  struct UserCall {
    Collective collective;
    uint64_t number;
  };
  std::optional<UserCall> part_of = {};

  uint8_t dtype_number() const {
    return moved_dtype != 0 ? moved_dtype : static_cast<uint8_t>(dtype);
  }
  Collective user_collective() const {  // the one of the call that the user made
    return sparse ? Collective::all_reduce : part_of ? part_of->collective : collective;
  }
};

// Blocks of a call buffer. A block-wise collective has one block per rank; a call buffer holds all
// of them or only this rank's own.
enum class BlockContent : uint8_t { nothing_in_blocks, all_blocks, own_block };
constexpr BlockContent input_of(Collective c, bool in_place) {
  switch (c) {
    case Collective::all_gather:
    case Collective::gather:
      return in_place ? BlockContent::all_blocks : BlockContent::own_block;
    case Collective::reduce_scatter:
    case Collective::all_to_all:
    case Collective::scatter:
      return BlockContent::all_blocks;
    default:
      return BlockContent::nothing_in_blocks;
  }
}
constexpr BlockContent output_of(Collective c, bool in_place) {
  switch (c) {
    case Collective::reduce_scatter:
    case Collective::scatter:
      return in_place ? BlockContent::all_blocks : BlockContent::own_block;
    case Collective::all_gather:
    case Collective::all_to_all:
    case Collective::gather:
      return BlockContent::all_blocks;
    default:
      return BlockContent::nothing_in_blocks;
  }
}

}  // namespace pycollect::ipc
