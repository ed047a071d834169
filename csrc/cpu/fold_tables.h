// The tables of fold kernels, one per instruction set, from which fold.cpp selects. They are plain
// arrays: a function of std::array, compiled for wide vectors, could become the only copy that the
// linker keeps for the whole program, and fail on other processors.
#pragma once
#include "../plan/dtype.h"
#include "fold.h"

namespace pycollect::cpu {

struct FoldsByOp {  // the kernels of one dtype, by op
  Fold of[ReduceOps::size];
};
// Convert elements to accumulators and back; null for types that accumulate in themselves.
struct Conversions {
  void (*widen)(float* to, const std::byte* from, std::size_t count, const FoldOptions& options);
  void (*narrow)(std::byte* to, const float* from, std::size_t count, const FoldOptions& options);
};
struct FoldTable {
  // A kernel is null if `reduces(dtype, op)` is false.
  FoldsByOp in_rank_order[DTypes::size], in_tree_order[DTypes::size];
  Conversions conversions[DTypes::size];
};

// The last two functions return null if the program was compiled for another architecture.
const FoldTable* portable_folds();
const FoldTable* avx2_folds();
const FoldTable* avx512_folds();

}  // namespace pycollect::cpu
