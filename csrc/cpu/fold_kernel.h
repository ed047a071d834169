// The fold function for every type and reduction, and the table of these functions. Included inside
// the namespace of an instruction set (see fold_vectors.h), after its definitions of Element<Half>
// and of the functions for parts of vectors (see fold_tail.h) and for non-temporal stores.
#pragma once
#include "fold_convert.h"
#include "fold_tree.h"

// With a world size known at compile time there are no inner loops, and the pointers are in
// registers: 1.2 times as fast as long as the data is in the caches.
template <int kWorld, class K>
[[gnu::always_inline]] inline std::size_t fold_world(const K& kernel, Pointers dsts, Pointers srcs,
                                                     std::size_t at, std::size_t bytes) {
  void *to[kWorld], *from[kWorld];
  for (int i = 0; i < kWorld; ++i) {
    to[i] = dsts.at[i];
    from[i] = srcs.at[i];
  }
  return fold_blocks(kernel, Pointers{to, kWorld}, Pointers{from, kWorld}, at, bytes,
                     WholeVector());
}

template <class K>
[[gnu::always_inline]] inline std::size_t fold_whole(const K& kernel, Pointers dsts, Pointers srcs,
                                                     std::size_t at, std::size_t bytes) {
  if constexpr (K::kHot) {
    constexpr int kMany = 12;                // ways of the L1 cache
    constexpr std::size_t kLarge = 2 << 20;  // bytes per source, more than the core's own caches
    if (srcs.n > kMany && bytes >= kLarge) at = fold_pieces(kernel, dsts, srcs, at, bytes);
    if (dsts.n == 2 && srcs.n == 2) return fold_world<2>(kernel, dsts, srcs, at, bytes);
    if (dsts.n == 4 && srcs.n == 4) return fold_world<4>(kernel, dsts, srcs, at, bytes);
    if (dsts.n == 8 && srcs.n == 8) return fold_world<8>(kernel, dsts, srcs, at, bytes);
  }
  return fold_blocks(kernel, dsts, srcs, at, bytes, WholeVector());
}

template <class K>
[[gnu::always_inline]] inline void fold_parts(const K& kernel, Pointers dsts, Pointers srcs,
                                              std::size_t at, std::size_t bytes) {
  for (; at < bytes; at += kVectorBytes) fold_block<1>(kernel, dsts, srcs, at, Tail(bytes - at));
}

template <class T, class Op>
void fold_bytes(Pointers dsts, Pointers srcs, std::size_t bytes, const FoldOptions& options) {
  const ElementOps<T, Op> kernel(options);
  std::size_t at = 0;
  if (options.non_temporal) [[unlikely]] {
    const std::size_t head = to_aligned(dsts, sizeof(T), bytes);
    if (head < bytes) {
      fold_parts(kernel, dsts, srcs, 0, head);
      at = fold_blocks(kernel, dsts, srcs, head, bytes, NonTemporal());
      fence_non_temporal();
    }
  }
  at = fold_whole(kernel, dsts, srcs, at, bytes);
  fold_parts(kernel, dsts, srcs, at, bytes);
}

template <class T, class Op>
void fold(Pointers dsts, Pointers srcs, std::size_t count, const FoldOptions& options) {
  using Same = decltype(kernel_type<T, Op, false>());
  fold_bytes<typename Same::Type, typename Same::Operation>(dsts, srcs, count * sizeof(T), options);
}

template <class T, class Op>
void fold_in_tree_order(Pointers dsts, Pointers srcs, std::size_t count,
                        const FoldOptions& options) {
  using Same = decltype(kernel_type<T, Op, false>());
  if (srcs.n <= kSameInBothOrders) return fold<T, Op>(dsts, srcs, count, options);
  fold_tree<typename Same::Type, typename Same::Operation>(dsts, srcs, count * sizeof(T), options);
}

template <class T, class Op>
constexpr Fold entry(FoldOrder order) {
  if constexpr (reduces_on<Op, T>) {
    if constexpr (order_matters_on<T, Op>)
      if (order == FoldOrder::tree) return &fold_in_tree_order<T, Op>;
    return &fold<T, Op>;
  }
  return nullptr;
}
template <class T, class... Op>
constexpr FoldsByOp row(FoldOrder order, TypeList<Op...>) {
  return {{entry<T, Op>(order)...}};
}
template <class... T>
constexpr FoldTable table(TypeList<T...>) {
  return {{row<T>(FoldOrder::rank, ReduceOps{})...},
          {row<T>(FoldOrder::tree, ReduceOps{})...},
          {conversions_of<T>()...}};
}
constexpr FoldTable kFolds = table(DTypes{});
