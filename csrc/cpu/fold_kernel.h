// The fold function for every type and reduction, in rank order and in tree order, and the table of
// these functions. Included inside the namespace of an instruction set (see fold_elements.h), after
// its definitions of Element<Half>, of PartOfVector if it has masks, and of non-temporal stores.
#pragma once
#include "fold_loop.h"

// --- in tree order
//
// Sources are combined in registers as far as they fit: eight at a time, then what is left in parts
// of four, two and one, which are parts of the tree. Their sums wait on a stack, as the digits of a
// binary counter: two sums of equally many sources are combined at once, so there are never more of
// them than log2 of the sources.

// Sets `sums` to those of kSources sources, from number `first` on.
template <int kSources, int kVectors, class K, class Access>
[[gnu::always_inline]] inline void tree_in_registers(VectorSums<K, kVectors>& sums, const K& kernel,
                                                     Pointers srcs, int first, std::size_t at,
                                                     Access access) {
  if constexpr (kSources == 1) {
    sums.load(kernel, stream(srcs, first, at), access);
  } else {
    constexpr int kLeft = left_half(kSources), kRight = kSources - kLeft;
    tree_in_registers<kLeft>(sums, kernel, srcs, first, at, access);
    if constexpr (kRight == 1) {
      sums.add(kernel, stream(srcs, first + kLeft, at), access);
    } else {
      VectorSums<K, kVectors> right;
      // Otherwise GCC may load all sources first, and has no registers for them.
      if constexpr (kSources > 4) asm volatile("" ::: "memory");
      tree_in_registers<kRight>(right, kernel, srcs, first + kLeft, at, access);
      sums.combine(right);
    }
  }
}

// Folds any number of sources, over up to kBlocks blocks of kVectors vectors at a time.
template <int kVectors, int kBlocks, class K>
struct TreeOfMany {
  static constexpr bool kInRegisters = K::kHot && kBlocks > 1;
  static constexpr int kMostSums = 32;  // of an int of sources
  static constexpr std::size_t kBlockBytes = std::size_t{kVectors} * kVectorBytes;
  const K& kernel;
  const Pointers dsts, srcs;
  int used = 0;
  VectorSums<K, kVectors> sums[kMostSums][kBlocks];

  TreeOfMany(const K& k, Pointers to, Pointers from) : kernel(k), dsts(to), srcs(from) {}

  template <class Access>
  [[gnu::always_inline]] void fold(std::size_t at, int blocks, bool non_temporal, Access access) {
    int first = 0;
    if constexpr (kInRegisters) {
      for (; first + 8 <= srcs.n; first += 8) push<8>(first, at, blocks, access);
      if (srcs.n & 4) push<4>(srcs.n & ~7, at, blocks, access);
      if (srcs.n & 2) push<2>(srcs.n & ~3, at, blocks, access);
      first = srcs.n & ~1;
    }
    for (; first < srcs.n; ++first) push<1>(first, at, blocks, access);
    while (used > 1) combine_last_two(blocks);
    used = 0;
    for (int b = 0; b < blocks; ++b, at += kBlockBytes) {
      Raw result[kVectors];
      sums[0][b].finish(kernel, result);
      for (int d = 0; d < dsts.n; ++d)
        if (non_temporal)
          store(stream(dsts, d, at), result, NonTemporal());
        else
          store(stream(dsts, d, at), result, access);
    }
  }

 private:
  template <int kSources, class Access>
  [[gnu::always_inline]] void push(int first, std::size_t at, int blocks, Access access) {
    for (int b = 0; b < blocks; ++b)
      tree_in_registers<kSources>(sums[used][b], kernel, srcs, first, at + b * kBlockBytes, access);
    ++used;
    for (int parts = first / kSources; parts % 2 != 0; parts /= 2) combine_last_two(blocks);
  }
  void combine_last_two(int blocks) {
    --used;
    for (int b = 0; b < blocks; ++b) sums[used - 1][b].combine(sums[used][b]);
  }
};

// Folds whole blocks of kSources sources, in registers alone. Returns the offset behind them.
template <int kSources, class K>
[[gnu::always_inline]] inline std::size_t tree_of_few(const K& kernel, Pointers dsts, Pointers srcs,
                                                      std::size_t at, std::size_t bytes) {
  constexpr std::size_t kBlock = kVectors<K> * kVectorBytes;
  const WholeVector access;
  void* from[kSources];
  for (int i = 0; i < kSources; ++i) from[i] = srcs.at[i];
  for (; at + kBlock <= bytes; at += kBlock) {
    VectorSums<K, kVectors<K>> sums;
    tree_in_registers<kSources>(sums, kernel, Pointers{from, kSources}, 0, at, access);
    Raw result[kVectors<K>];
    sums.finish(kernel, result);
    each<true>(0, dsts.n,
               [&](int d) [[gnu::always_inline]] { store(stream(dsts, d, at), result, access); });
  }
  return at;
}

// Folds whole blocks from offset `at` on, and returns the offset behind them. As in fold_pieces,
// many sources take turns over a piece that stays in the cache.
template <class K>
[[gnu::always_inline]] inline std::size_t tree_of_blocks(const K& kernel, Pointers dsts,
                                                         Pointers srcs, std::size_t at,
                                                         std::size_t bytes, bool non_temporal) {
  if constexpr (K::kHot) {
    if (srcs.n == 4 && !non_temporal) {
      if (dsts.n != 4) return tree_of_few<4>(kernel, dsts, srcs, at, bytes);
      void* const to[] = {dsts.at[0], dsts.at[1], dsts.at[2], dsts.at[3]};
      return tree_of_few<4>(kernel, Pointers{to, 4}, srcs, at, bytes);
    }
    if (srcs.n == 8 && !non_temporal) return tree_of_few<8>(kernel, dsts, srcs, at, bytes);
  }
  constexpr std::size_t kBlock = kVectors<K> * kVectorBytes;
  constexpr int kBlocks = K::kHot ? 512 / kBlock : 1;
  TreeOfMany<kVectors<K>, kBlocks, K> tree(kernel, dsts, srcs);
  while (at + kBlock <= bytes) {
    const std::size_t left = (bytes - at) / kBlock;
    const int blocks = left < kBlocks ? static_cast<int>(left) : kBlocks;
    tree.fold(at, blocks, non_temporal, WholeVector());
    at += blocks * kBlock;
  }
  return at;
}

// Folds all bytes.
template <class T, class Op>
void fold_tree(Pointers dsts, Pointers srcs, std::size_t bytes, const FoldOptions& options) {
  const ElementOps<T, Op> kernel(options);
  TreeOfMany<1, 1, ElementOps<T, Op>> edges(kernel, dsts, srcs);
  const std::size_t head = options.non_temporal ? to_aligned(dsts, sizeof(T), bytes) : bytes;
  const bool non_temporal = head < bytes;
  std::size_t at = 0;
  for (const std::size_t end : {non_temporal ? head : 0, bytes}) {
    if (end == bytes) at = tree_of_blocks(kernel, dsts, srcs, at, bytes, non_temporal);
    for (; at < end; at += kVectorBytes) edges.fold(at, 1, false, Tail(end - at));
    at = end;
  }
  if (non_temporal) fence_non_temporal();
}

// --- conversions of whole rows between narrow floats and their accumulators

// The accumulators of one vector of elements, as `decode` returns them, and as floats.
template <class T>
union Accumulators {
  using Part = typename Element<T>::Acc;
  static constexpr int kParts = Element<T>::kParts, kLanes = kVectorBytes / 4;
  Part parts[kParts];
  float values[kParts][kLanes];
  // Returns the accumulator of an element.
  [[gnu::always_inline]] float& at(int element) {
    if constexpr (Element<T>::kConsecutive)
      return values[element / kLanes][element % kLanes];
    else
      return values[element % kParts][element / kParts];
  }
};

template <class T>
void widen(float* to, const std::byte* from, std::size_t count, const FoldOptions& options) {
  constexpr std::size_t kElements = kVectorBytes / sizeof(T);
  const Element<T> element(options);
  for (std::size_t done = 0; done < count; done += kElements) {
    const std::size_t n = count - done < kElements ? count - done : kElements;
    Raw raw = {};
    Accumulators<T> all;
    if (n == kElements) {
      __builtin_memcpy(&raw, from + done * sizeof(T), sizeof raw);
      element.decode(raw, all.parts);
      for (std::size_t i = 0; i < kElements; ++i) to[done + i] = all.at(i);
    } else {
      __builtin_memcpy(&raw, from + done * sizeof(T), n * sizeof(T));
      element.decode(raw, all.parts);
      for (std::size_t i = 0; i < n; ++i) to[done + i] = all.at(i);
    }
  }
}

template <class T>
void narrow(std::byte* to, const float* from, std::size_t count, const FoldOptions& options) {
  constexpr std::size_t kElements = kVectorBytes / sizeof(T);
  const Element<T> element(options);
  for (std::size_t done = 0; done < count; done += kElements) {
    const std::size_t n = count - done < kElements ? count - done : kElements;
    Accumulators<T> all{};
    if (n == kElements)
      for (std::size_t i = 0; i < kElements; ++i) all.at(i) = from[done + i];
    else
      for (std::size_t i = 0; i < n; ++i) all.at(i) = from[done + i];
    const Raw raw = element.encode(all.parts);
    __builtin_memcpy(to + done * sizeof(T), &raw, n * sizeof(T));
  }
}

template <class T>
constexpr Conversions conversions_of() {
  if constexpr (is_narrow<T>)
    return {&widen<T>, &narrow<T>};
  else
    return {nullptr, nullptr};
}

// --- in rank order, and the table

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
