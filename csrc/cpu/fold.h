// The one arithmetic kernel of the host: every dst[i] = srcs[0][i] op srcs[1][i] op ..., for every
// dtype and op, with the widest vectors that this processor has (chosen once). Adds in rank order,
// in the accumulator of the contract, and rounds once. A dst may be a src; they must not overlap
// otherwise.
#pragma once
#include <cstddef>

#include "../plan/dtype.h"

namespace pycollect::cpu {

struct Pointers {
  void* const* at;
  int n;
};
using Fold = void (*)(Pointers dsts, Pointers srcs, std::size_t count, const FoldOptions& options);

// Null where `reduces(dtype, op)` is false.
Fold find_fold(DType dtype, ReduceOp op);

// One source: bytes to every destination that is not the source itself.
void copy(Pointers dsts, const void* src, std::size_t bytes, bool non_temporal);

const char* instruction_set();  // "avx512", "avx2" or "portable": for `pycollect info`

}  // namespace pycollect::cpu
