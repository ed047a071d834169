// Selects the kernels for this processor, and copies, which need no arithmetic.
#include "fold.h"

#include <algorithm>
#include <cstring>

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

Fold find_fold(DType dtype, ReduceOp op, FoldOrder order) {
  const FoldTable& folds = *chosen().folds;
  const auto& in_order = order == FoldOrder::tree ? folds.in_tree_order : folds.in_rank_order;
  return in_order[static_cast<std::size_t>(dtype)].of[static_cast<std::size_t>(op)];
}

AccumulatorFold::AccumulatorFold(DType dtype, ReduceOp op)
    : dtype_(dtype),
      accumulator_(accumulator(dtype)),
      finishing_(find_fold(accumulator_, op)),
      adding_(find_fold(accumulator_, op == ReduceOp::avg ? ReduceOp::sum : op)) {}

// Combines blocks of accumulators, which stay in the caches: one source after the other with the
// sum so far, or in tree order the last two sums of equally many sources, as in fold_kernel.h.
void AccumulatorFold::run(bool finishes, Pointers dsts, bool partial_dsts, Pointers srcs,
                          int partial_srcs, int before, std::size_t count,
                          const FoldOptions& options) const {
  constexpr std::size_t kBlockBytes = 4096;
  constexpr int kMost = 33;  // sums of an int of sources, and the next source
  alignas(64) std::byte sums[kMost][kBlockBytes];
  const bool tree = options.order == FoldOrder::tree, is_narrow = dtype_ != accumulator_;
  const std::size_t item = item_bytes(dtype_), wide = item_bytes(accumulator_);
  const Conversions& convert = chosen().folds->conversions[static_cast<std::size_t>(dtype_)];
  const auto load = [&](std::byte* to, int i, std::size_t from, std::size_t n) {
    const auto* const src = static_cast<const std::byte*>(srcs.at[i]);
    if (i < partial_srcs || !is_narrow)
      std::memcpy(to, src + from * wide, n * wide);
    else
      convert.widen(reinterpret_cast<float*>(to), src + from * item, n, options);
  };
  const auto store = [&](void* dst, const std::byte* from, std::size_t at, std::size_t n) {
    auto* const to = static_cast<std::byte*>(dst);
    if (partial_dsts || !is_narrow)
      std::memcpy(to + at * wide, from, n * wide);
    else
      convert.narrow(to + at * item, reinterpret_cast<const float*>(from), n, options);
  };
  const std::size_t block = kBlockBytes / wide;
  for (std::size_t at = 0; at < count; at += block) {
    const std::size_t n = std::min(block, count - at);
    int used = 0;
    for (int i = 0; i < srcs.n; ++i) {
      load(sums[used++], i, at, n);
      if (tree && i < partial_srcs) continue;
      const bool ends = i + 1 == srcs.n && finishes;
      for (int parts = tree ? before + i - partial_srcs : 1; used > 1 && (ends || parts % 2 != 0);
           parts /= 2) {
        --used;
        void* const both[] = {sums[used - 1], sums[used]};
        (ends && used == 1 ? finishing_ : adding_)({both, 1}, {both, 2}, n, options);
      }
    }
    for (int d = 0; d < dsts.n; ++d) store(dsts.at[d], sums[tree && !finishes ? d : 0], at, n);
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
