// The loops of a fold over memory: a few vectors of every source are combined in registers and
// written to every destination before the next few are read, so each byte moves once. Included
// inside the namespace of an instruction set (see fold_elements.h).
#pragma once
#include "fold_elements.h"

// --- the arithmetic of accumulators

// (a + bi)(c + di), the textbook way: ac - bd and ad + bc.
template <class V, int kLanes>
[[gnu::always_inline]] inline V complex_product(V x, V y) {
  using Bits = Vector<std::conditional_t<kLanes * 4 == kVectorBytes, uint32_t, uint64_t>>;
  Bits lane, sign = {};
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  for (int i = 0; i < kLanes; i += 2) sign[i] = ~(~decltype(sign[0] + 0){} >> 1);
  const V a = __builtin_shuffle(x, lane & ~decltype(sign[0] + 0){1});
  const V b = __builtin_shuffle(x, lane | 1), swapped = __builtin_shuffle(y, lane ^ 1);
  return a * y + as<V>(as<Bits>(b * swapped) ^ sign);
}

// Divides the wrapped sum by the number of ranks, rounding toward zero. Floats that hold every
// numerator exactly give the exact result (the distance of a fractional quotient to the next
// integer is more than their rounding), and unlike integers they have vector division.
template <class T>
[[gnu::always_inline]] inline Vector<T> quotient(Vector<T> sum, int world) {
  using Divided =
      std::conditional_t<sizeof(T) == 8, T, std::conditional_t<sizeof(T) == 4, double, float>>;
  T items[kVectorBytes / sizeof(T)];
  __builtin_memcpy(items, &sum, sizeof sum);
  for (T& item : items)
    item = static_cast<T>(static_cast<Divided>(item) / static_cast<Divided>(world));
  __builtin_memcpy(&sum, items, sizeof sum);
  return sum;
}

template <class T, class Op>
struct ElementOps : Element<T> {
  using Acc = typename Element<T>::Acc;
  // Kernels that get more code for more speed: sums, which are the usual reduction. The gain is
  // small where there is more arithmetic than memory access, or vectors are narrow.
  static constexpr bool kHot =
      kVectorBytes > 16 && !Element<T>::kSlow &&
      (std::is_same_v<Op, Sum> || (std::is_same_v<Op, Avg> && !std::is_integral_v<T>));
  int world;
  double inverse;
  explicit ElementOps(const FoldOptions& o)
      : Element<T>(o), world(o.world), inverse(1.0 / o.world) {}

  [[gnu::always_inline]] static Acc combined(Acc a, Acc b) {
    if constexpr (std::is_same_v<Op, Prod> && is_complex<T>) {
      return complex_product<Acc, kVectorBytes / sizeof(T) * 2>(a, b);
    } else if constexpr (std::is_integral_v<T> && Op::kOperands == Operands::numbers) {
      using Wrapping = Vector<std::make_unsigned_t<T>>;  // signed overflow is undefined in C++
      return as<Acc>(Op::template combined<false>(as<Wrapping>(a), as<Wrapping>(b)));
    } else {
      return Op::template combined<is_float<T>>(a, b);
    }
  }
  [[gnu::always_inline]] Acc finished(Acc v) const {
    if constexpr (!std::is_same_v<Op, Avg>)
      return v;
    else if constexpr (std::is_integral_v<T>)
      return quotient<T>(v, world);
    else
      return v * static_cast<decltype(v[0] + 0)>(inverse);
  }
};

// --- the loops

template <bool kUnrolled, class F>
[[gnu::always_inline]] inline void each(int first, int end, F body) {
  if constexpr (kUnrolled) {
#pragma GCC unroll 8
    for (int i = first; i < end; ++i) body(i);
  } else {
#pragma GCC unroll 1
    for (int i = first; i < end; ++i) body(i);
  }
}

// The sums of kVectors vectors of every source.
template <class K, int kVectors>
struct VectorSums {
  typename K::Acc sums[kVectors][K::kParts];

  template <class Access>
  [[gnu::always_inline]] void load(const K& kernel, const std::byte* src, Access access) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) kernel.decode(access.load(src + v * kVectorBytes), sums[v]);
  }
  template <class Access>
  [[gnu::always_inline]] void add(const K& kernel, const std::byte* src, Access access) {
    typename K::Acc next[K::kParts];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      kernel.decode(access.load(src + v * kVectorBytes), next);
#pragma GCC unroll 4
      for (int p = 0; p < K::kParts; ++p) sums[v][p] = K::combined(sums[v][p], next[p]);
    }
  }
  [[gnu::always_inline]] void combine(const VectorSums& right) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
      for (int p = 0; p < K::kParts; ++p) sums[v][p] = K::combined(sums[v][p], right.sums[v][p]);
    }
  }
  [[gnu::always_inline]] void finish(const K& kernel, Raw (&result)[kVectors]) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
      for (int p = 0; p < K::kParts; ++p) sums[v][p] = kernel.finished(sums[v][p]);
      result[v] = kernel.encode(sums[v]);
    }
  }
};

// The first bytes of a vector, at the end of a row.
struct Tail {
  PartOfVector<kVectorBytes> part;
  [[gnu::always_inline]] explicit Tail(std::size_t bytes)
      : part{bytes < kVectorBytes ? bytes : kVectorBytes} {}
  [[gnu::always_inline]] Raw load(const std::byte* from) const { return part.load(from); }
  [[gnu::always_inline]] void store(std::byte* to, Raw v) const { part.store(to, v); }
};

struct NonTemporal : WholeVector {
  [[gnu::always_inline]] static void store(std::byte* to, Raw v) { store_non_temporal(to, v); }
};

// Returns the offset at which every destination is aligned for streamed stores; `bytes` or more if
// there is none.
inline std::size_t to_aligned(Pointers dsts, std::size_t item, std::size_t bytes) {
  const auto past = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % kVectorBytes; };
  const std::size_t head = (kVectorBytes - past(dsts.at[0])) % kVectorBytes;
  if (head % item != 0) return bytes;
  for (int d = 1; d < dsts.n; ++d)
    if (past(dsts.at[d]) != past(dsts.at[0])) return bytes;
  return head;
}

[[gnu::always_inline]] inline std::byte* stream(Pointers streams, int i, std::size_t at) {
  return static_cast<std::byte*>(streams.at[i]) + at;
}

template <int kVectors, class Access>
[[gnu::always_inline]] inline void store(std::byte* dst, const Raw (&result)[kVectors],
                                         Access access) {
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) access.store(dst + v * kVectorBytes, result[v]);
}

// Folds the bytes of kVectors vectors, from offset `at`, of every source into every destination.
template <int kVectors, class K, class Access>
[[gnu::always_inline]] inline void fold_block(const K& kernel, Pointers dsts, Pointers srcs,
                                              std::size_t at, Access access) {
  VectorSums<K, kVectors> block;
  Raw result[kVectors];
  block.load(kernel, stream(srcs, 0, at), access);
  each<K::kHot>(1, srcs.n, [&](int s) [[gnu::always_inline]] {
    block.add(kernel, stream(srcs, s, at), access);
  });
  block.finish(kernel, result);
  each<K::kHot>(0, dsts.n,
                [&](int d) [[gnu::always_inline]] { store(stream(dsts, d, at), result, access); });
}

// Four chains of additions hide the latency of one.
template <class K>
constexpr int kVectors = 4 / K::kParts;

template <class K, class Access>
[[gnu::always_inline]] inline std::size_t fold_blocks(const K& kernel, Pointers dsts, Pointers srcs,
                                                      std::size_t at, std::size_t bytes,
                                                      Access access) {
  constexpr std::size_t kBlock = kVectors<K> * kVectorBytes;
  for (; at + kBlock <= bytes; at += kBlock)
    fold_block<kVectors<K>>(kernel, dsts, srcs, at, access);
  return at;
}

// Adds a few sources at a time over a piece that stays in the cache, then a few more. Up to twice
// as fast as fold_blocks if there are more streams than the L1 cache has ways and the prefetchers
// follow, and more data than the caches hold; slower in all other cases.
template <class K>
inline std::size_t fold_pieces(const K& kernel, Pointers dsts, Pointers srcs, std::size_t at,
                               std::size_t bytes) {
  constexpr std::size_t kBlock = kVectors<K> * kVectorBytes, kPiece = 2048;
  constexpr int kSourcesAtOnce = 8;
  VectorSums<K, kVectors<K>> blocks[kPiece / kBlock];
  Raw results[kPiece / kBlock][kVectors<K>];
  for (; at + kPiece <= bytes; at += kPiece) {
    for (int first = 0; first < srcs.n; first += kSourcesAtOnce) {
      const int end = first + kSourcesAtOnce < srcs.n ? first + kSourcesAtOnce : srcs.n;
      for (std::size_t b = 0; b < kPiece / kBlock; ++b) {
        const std::size_t from = at + b * kBlock;
        VectorSums<K, kVectors<K>> block;
        if (first == 0)
          block.load(kernel, stream(srcs, 0, from), WholeVector());
        else
          block = blocks[b];
        each<true>(first > 0 ? first : 1, end, [&](int s) [[gnu::always_inline]] {
          block.add(kernel, stream(srcs, s, from), WholeVector());
        });
        if (end == srcs.n) block.finish(kernel, results[b]);
        blocks[b] = block;
      }
    }
    for (int d = 0; d < dsts.n; ++d)
      for (std::size_t b = 0; b < kPiece / kBlock; ++b)
        store(stream(dsts, d, at + b * kBlock), results[b], WholeVector());
  }
  return at;
}
