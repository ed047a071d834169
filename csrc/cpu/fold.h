// The arithmetic kernel of the host: every dst[i] = srcs[0][i] op srcs[1][i] op ..., for every
// dtype, op and order, with the widest vectors of this processor (selected once). It combines the
// sources in that order, in the accumulator type of the contract, and rounds once. A dst may be the
// same as a src; they must not overlap otherwise.
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
Fold find_fold(DType dtype, ReduceOp op, FoldOrder order = FoldOrder::rank);

// Copies the bytes to every destination that is not the source itself.
void copy(Pointers dsts, const void* src, std::size_t bytes, bool non_temporal);

// Folds from and to accumulators, whose sum it continues without rounding. Does what find_fold's
// kernel does with sources and destinations of one type.
class AccumulatorFold {
 public:
  AccumulatorFold(DType dtype, ReduceOp op);  // which reduces by `op`
  // The first `partial_srcs` sources are accumulators. `partial_dsts`: so are the destinations.
  // In rank order there is one partial sum at most. In tree order there is one for each bit that is
  // set in `before`, the number of sources that they are the sums of: those of more sources come
  // first. Unless the fold `finishes`, its destinations then are those of all sources so far.
  void run(bool finishes, Pointers dsts, bool partial_dsts, Pointers srcs, int partial_srcs,
           int before, std::size_t count, const FoldOptions& options) const;

 private:
  const DType dtype_, accumulator_;
  const Fold finishing_, adding_;
};

const char* instruction_set();  // "avx512", "avx2" or "portable": for `pycollect info`

struct FoldsByOp {  // the kernels of one dtype, by op
  Fold of[ReduceOps::size];
};
// Convert elements to accumulators and back; null for types that accumulate in themselves.
struct Conversions {
  void (*widen)(float* to, const std::byte* from, std::size_t count, const FoldOptions& options);
  void (*narrow)(std::byte* to, const float* from, std::size_t count, const FoldOptions& options);
};
// The fold kernels of an instruction set, of which fold.cpp selects one. The tables are plain
// arrays: a function of std::array, compiled for wide vectors, could become the only copy that the
// linker keeps for the whole program, and fail on other processors.
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
