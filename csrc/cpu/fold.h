// The arithmetic kernel of the host: every dst[i] = srcs[0][i] op srcs[1][i] op ..., for every
// dtype and op, with the widest vectors of this processor (selected once). It adds in the order of
// the sources, in the accumulator type of the contract, and rounds once. A dst may be the same as a
// src; they must not overlap otherwise.
#pragma once
#include <cstddef>

#include "../plan/dtype.h"

namespace pycollect::cpu {

struct Pointers {
  void* const* at;
  int n;
};
using Fold = void (*)(Pointers dsts, Pointers srcs, std::size_t count, const FoldOptions& options);

// Returns the kernel, or null where `reduces(dtype, op)` is false.
Fold find_fold(DType dtype, ReduceOp op);

// Copies the bytes to every destination that is not the source itself.
void copy(Pointers dsts, const void* src, std::size_t bytes, bool non_temporal);

const char* instruction_set();  // "avx512", "avx2" or "portable": for `pycollect info`

}  // namespace pycollect::cpu
