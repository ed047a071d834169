// The tables of fold kernels, one per instruction set, from which fold.cpp selects. Plain arrays,
// so that a file compiled for wide vectors emits no function of a shared template.
#pragma once
#include "../plan/kernel_type.h"
#include "fold.h"

namespace pycollect::cpu {

struct FoldRow {
  Fold of[ReduceOps::size];
};
struct FoldTable {
  FoldRow of[DTypes::size];  // null entries where the contract has no such reduction
};

// Each returns null where the compiler's target is another architecture.
const FoldTable* portable_folds();
const FoldTable* avx2_folds();
const FoldTable* avx512_folds();

}  // namespace pycollect::cpu
