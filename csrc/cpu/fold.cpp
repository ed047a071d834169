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

AccumulatorFold::AccumulatorFold(DType dtype, ReduceOp op)
    : dtype_(dtype),
      finishing_(find_fold(DType::f32, op)),
      adding_(find_fold(DType::f32, op == ReduceOp::avg ? ReduceOp::sum : op)) {}

// Adds one source at a time to a block of accumulators, which stays in the L1 cache.
void AccumulatorFold::run(bool finishes, Pointers dsts, bool partial_dsts, Pointers srcs,
                          int partial_srcs, std::size_t count, const FoldOptions& options) const {
  constexpr std::size_t kBlock = 1024;
  alignas(64) float sum[kBlock], next[kBlock];
  const Conversions& convert = chosen().folds->conversions[static_cast<std::size_t>(dtype_)];
  const auto load = [&](float* to, int i, std::size_t from, std::size_t n) {
    const auto* const src = static_cast<const std::byte*>(srcs.at[i]);
    if (i < partial_srcs)
      std::memcpy(to, src + from * sizeof(float), n * sizeof(float));
    else
      convert.widen(to, src + from * item_bytes(dtype_), n, options);
  };
  for (std::size_t at = 0; at < count; at += kBlock) {
    const std::size_t n = std::min(kBlock, count - at);
    load(sum, 0, at, n);
    for (int i = 1; i < srcs.n; ++i) {
      load(next, i, at, n);
      void* const both[] = {sum, next};
      (finishes && i + 1 == srcs.n ? finishing_ : adding_)({both, 1}, {both, 2}, n, options);
    }
    for (int d = 0; d < dsts.n; ++d) {
      auto* const dst = static_cast<std::byte*>(dsts.at[d]);
      if (partial_dsts)
        std::memcpy(dst + at * sizeof(float), sum, n * sizeof(float));
      else
        convert.narrow(dst + at * item_bytes(dtype_), sum, n, options);
    }
  }
}

const char* instruction_set() { return chosen().name; }

void copy(Pointers dsts, const void* src, std::size_t bytes, bool non_temporal) {
  if (dsts.n == 1 && !non_temporal) {
    if (dsts.at[0] != src) std::memcpy(dsts.at[0], src, bytes);
    return;
  }
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
