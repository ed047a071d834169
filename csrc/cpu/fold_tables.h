// The tables of fold kernels, one per instruction set, from which fold.cpp selects. They are plain
// arrays: a function of std::array, compiled for wide vectors, could become the only copy that the
// linker keeps for the whole program, and fail on other processors.
#pragma once
#include "../plan/kernel_type.h"
#include "fold.h"

namespace pycollect::cpu {

struct FoldsByOp {  // the kernels of one dtype, by op
  Fold of[ReduceOps::size];
};
struct FoldTable {
  FoldsByOp of[DTypes::size];  // a kernel is null if `reduces(dtype, op)` is false
};

// The last two functions return null if the program was compiled for another architecture.
const FoldTable* portable_folds();
const FoldTable* avx2_folds();
const FoldTable* avx512_folds();

}  // namespace pycollect::cpu
