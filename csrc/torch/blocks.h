// Block sizes of the collectives that split and concatenate tensors along a dimension: the blocks
// that each rank has in its input and in its output. Everything else is the same for all of these
// collectives (block_collectives.cpp). This file contains no tensors.
#pragma once
#include <optional>

#include "../plan/offsets.h"
#include "../plan/registry.h"

namespace pycollect {

// Elements along the dimension, [rank][block], in the input and in the output of every rank.
struct BlockSizes {
  std::vector<Sizes> in, out;
  // Sizes of all blocks, as in scratch memory; an input or output has some or all of them.
  Sizes whole;
};

struct BlockCut {
  Collective collective;
  // Sizes of the inputs along the dimension, in rank order: one for scatter, and the same one
  // `world` times for reduce_scatter.
  std::vector<int64_t> lengths;
  int world;    // number of ranks, including an additional rank that is only the root
  int outputs;  // number of outputs
  Rank root = 0;
  int64_t dim = 0;  // for error messages
  // Block sizes from the caller: [rank][block], or one list for all ranks.
  std::optional<std::vector<std::vector<int64_t>>> sizes = {};
};

// Returns the caller's blocks, or those of torch.tensor_split if `sizes` is empty. Throws
// ValueError if the caller's sizes do not fit the lengths.
BlockSizes blocks_of(const BlockCut& cut);

// Returns the sum of the sizes. Throws ValueError if it does not fit 64 bits.
int64_t sum(const Sizes& sizes, const char* call);

}  // namespace pycollect
