// Selects the kernels for this processor, and copies, which need no arithmetic.
#include "fold.h"

#include <algorithm>
#include <cstring>

#include "fold_tables.h"

namespace pycollect::cpu {
namespace {

struct Chosen {
  const FoldTable* folds;
  const char* name;
};

Chosen choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (avx512_folds() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return {avx512_folds(), "avx512"};
  if (avx2_folds() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"))
    return {avx2_folds(), "avx2"};
#endif
  return {portable_folds(), "portable"};
}

const Chosen& chosen() {
  static const Chosen once = choose();
  return once;
}

}  // namespace

Fold find_fold(DType dtype, ReduceOp op) {
  return chosen().folds->of[static_cast<std::size_t>(dtype)].of[static_cast<std::size_t>(op)];
}

const char* instruction_set() { return chosen().name; }

void copy(Pointers dsts, const void* src, std::size_t bytes, bool non_temporal) {
  // memcpy streams one large block by itself, a little faster than this.
  constexpr std::size_t kLarge = 32 << 20;
  const bool onto_itself = std::find(dsts.at, dsts.at + dsts.n, src) != dsts.at + dsts.n;
  if (non_temporal && !onto_itself && (dsts.n > 1 || bytes < kLarge)) {
    void* const from = const_cast<void*>(src);  // a fold of one source does not write to it
    find_fold(DType::u8, ReduceOp::bor)(dsts, {&from, 1}, bytes, {.non_temporal = true});
    return;
  }
  // Copies to one destination at a time, from a piece of the source that stays in the L1 cache.
  constexpr std::size_t kPiece = 16 << 10;
  const std::size_t piece = dsts.n == 1 ? bytes : kPiece;
  for (std::size_t at = 0; at < bytes; at += piece)
    for (int d = 0; d < dsts.n; ++d)
      if (dsts.at[d] != src)
        std::memcpy(static_cast<std::byte*>(dsts.at[d]) + at,
                    static_cast<const std::byte*>(src) + at, std::min(piece, bytes - at));
}

}  // namespace pycollect::cpu
