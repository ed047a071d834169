// Block sizes of the collectives that split and concatenate along a dimension: which rank sends
// which block to which rank, in which alone these collectives differ. Contains no tensors.
#pragma once
#include <optional>

#include "../plan/offsets.h"
#include "../plan/registry.h"

namespace pycollect {

// Elements along the dimension, [rank][block], in the input and in the output of every rank.
struct Blocks {
  std::vector<Sizes> in, out;
  Sizes whole;  // all blocks: inputs and outputs have some or all of them; scratch is cut like them
};

struct BlockCut {
  Collective collective;
  // Sizes of the inputs along the dimension, in rank order: one for scatter, and the same one
  // `world` times for reduce_scatter.
  std::vector<int64_t> lengths;
  int world;    // number of ranks, including a root that is only the root of scatter or gather
  int outputs;  // number of outputs
  Rank root = 0;
  int64_t dim = 0;  // for error messages
  // Block sizes from the caller: [rank][block], or one list for all ranks.
  std::optional<std::vector<std::vector<int64_t>>> sizes = {};
};

// Returns the caller's blocks, or those of torch.tensor_split if `sizes` is empty. Throws
// ValueError if the caller's sizes do not fit the lengths.
Blocks blocks_of(const BlockCut& cut);

// Returns the sum of the sizes. Throws ValueError if it does not fit 64 bits.
int64_t sum(const Sizes& sizes, const char* call);

}  // namespace pycollect
