// Who sends which block to whom, along one dimension: all that the collectives that cut and join
// differ in. Sizes only; no tensors.
#pragma once
#include <optional>

#include "../plan/offsets.h"
#include "../plan/registry.h"

namespace pycollect {

// Elements along the dimension, [rank][block], in the input and in the output of every rank.
struct Blocks {
  std::vector<Sizes> in, out;
  Sizes whole;  // the cut that every buffer is a part of: where scratch lies
};

struct BlockCut {
  Collective collective;
  std::vector<int64_t>
      lengths;  // of the inputs, in rank order; scatter has one, reduce_scatter W alike
  int world;    // with ...
  int outputs;  // ... ranks behind these that only are the root of scatter or gather
  Rank root = 0;
  int64_t dim = 0;                                              // for messages
  std::optional<std::vector<std::vector<int64_t>>> sizes = {};  // the caller's, [rank][block]
};

// Cuts as torch.tensor_split where the caller gives no sizes. Throws ValueError for sizes that do
// not fit.
Blocks blocks_of(const BlockCut& cut);

// Throws ValueError for a sum beyond 64 bits.
int64_t sum(const Sizes& sizes, const char* call);

}  // namespace pycollect
