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

// Folds narrow floats from and to accumulators (float32), whose sum it continues without rounding.
// Does what find_fold's kernel does with sources and destinations of one type.
class AccumulatorFold {
 public:
  // `dtype` does not accumulate in itself, and reduces by `op`.
  AccumulatorFold(DType dtype, ReduceOp op);
  // `partial_srcs`: number of sources that are accumulators, the first ones. `partial_dsts`: the
  // destinations are accumulators. `finishes`: `avg` divides.
  void run(bool finishes, Pointers dsts, bool partial_dsts, Pointers srcs, int partial_srcs,
           std::size_t count, const FoldOptions& options) const;

 private:
  const DType dtype_;
  const Fold finishing_, adding_;
};

const char* instruction_set();  // "avx512", "avx2" or "portable": for `pycollect info`

}  // namespace pycollect::cpu
