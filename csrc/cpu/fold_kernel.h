// The fold itself, for every type and reduction: a few vectors of every source are combined in
// registers and written to every destination before the next few are read, so each byte moves once.
// Included inside the namespace of an instruction set, as fold_vectors.h says, after its Part,
// Streamed and Element<Half>.
#pragma once
#include "fold_elements.h"

// Kernels that would compute the same are one: a bit does not know its type, nor a wrapping sum
// its sign, and a sum of complex numbers is one of twice as many reals.
template <class T, class Op>
struct Work {
  using Type = T;
  using Operation = Op;
};
template <class T, class Op>
constexpr auto canonical() {
  constexpr bool sums = std::is_same_v<Op, Sum>, multiplies = std::is_same_v<Op, Prod>;
  if constexpr (std::is_same_v<T, Bool> && !is_bitwise<Op>)
    return Work<Bool, std::conditional_t<sums || std::is_same_v<Op, Max>, BitOr, BitAnd>>{};
  else if constexpr (is_bitwise<Op> && !std::is_same_v<T, Bool>)
    return Work<uint8_t, Op>{};
  else if constexpr (std::is_integral_v<T> && (sums || multiplies))
    return Work<std::make_unsigned_t<T>, Op>{};
  else if constexpr (is_complex<T> && !multiplies)
    return Work<decltype(T::real), Op>{};
  else
    return Work<T, Op>{};
}

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

template <class T, class Op, class V>
[[gnu::always_inline]] inline V apply(V a, V b) {
  if constexpr (std::is_same_v<Op, Sum> || std::is_same_v<Op, Avg>)
    return a + b;
  else if constexpr (std::is_same_v<Op, Prod> && is_complex<T>)
    return complex_product<V, kVectorBytes / sizeof(T) * 2>(a, b);
  else if constexpr (std::is_same_v<Op, Prod>)
    return a * b;
  else if constexpr (std::is_same_v<Op, Min> && is_float<T>)
    return (a < b) | (a != a) ? a : b;  // NaN wins
  else if constexpr (std::is_same_v<Op, Max> && is_float<T>)
    return (a > b) | (a != a) ? a : b;
  else if constexpr (std::is_same_v<Op, Min>)
    return a < b ? a : b;
  else if constexpr (std::is_same_v<Op, Max>)
    return a > b ? a : b;
  else if constexpr (std::is_same_v<Op, BitAnd>)
    return a & b;
  else if constexpr (std::is_same_v<Op, BitOr>)
    return a | b;
  else
    return a ^ b;
}

// The wrapped sum over the number of ranks, toward zero. Floats that hold every quotient's
// numerator exactly give it exactly (a quotient that is no integer is further from the next one
// than their rounding), and have vector instructions, which integers have not.
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
struct Kernel : Element<T> {
  using Acc = typename Element<T>::Acc;
  // Worth more code: sums are what everybody asks for, and little is gained where there is more
  // arithmetic than memory access, or vectors are narrow.
  static constexpr bool kHot =
      kVectorBytes > 16 && !Element<T>::kSlow &&
      (std::is_same_v<Op, Sum> || (std::is_same_v<Op, Avg> && !std::is_integral_v<T>));
  int world;
  double inverse;
  explicit Kernel(const FoldOptions& o) : Element<T>(o), world(o.world), inverse(1.0 / o.world) {}

  [[gnu::always_inline]] static Acc combined(Acc a, Acc b) { return apply<T, Op>(a, b); }
  [[gnu::always_inline]] Acc finished(Acc v) const {
    if constexpr (!std::is_same_v<Op, Avg>)
      return v;
    else if constexpr (std::is_integral_v<T>)
      return quotient<T>(v, world);
    else
      return v * static_cast<decltype(v[0] + 0)>(inverse);
  }
};

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

// Of every source and destination, the bytes of kVectors vectors from `at` on.
template <int kVectors, class K, class Access>
[[gnu::always_inline]] inline void fold_block(const K& kernel, Pointers dsts, Pointers srcs,
                                              std::size_t at, Access access) {
  typename K::Acc sums[kVectors][K::kParts], next[K::kParts];
  const std::byte* src = static_cast<const std::byte*>(srcs.at[0]) + at;
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) kernel.decode(access.load(src + v * kVectorBytes), sums[v]);
  each<K::kHot>(1, srcs.n, [&](int s) [[gnu::always_inline]] {
    src = static_cast<const std::byte*>(srcs.at[s]) + at;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      kernel.decode(access.load(src + v * kVectorBytes), next);
#pragma GCC unroll 4
      for (int p = 0; p < K::kParts; ++p) sums[v][p] = K::combined(sums[v][p], next[p]);
    }
  });
  Raw result[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
    for (int p = 0; p < K::kParts; ++p) sums[v][p] = kernel.finished(sums[v][p]);
    result[v] = kernel.encode(sums[v]);
  }
  each<K::kHot>(0, dsts.n, [&](int d) [[gnu::always_inline]] {
    std::byte* dst = static_cast<std::byte*>(dsts.at[d]) + at;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) access.store(dst + v * kVectorBytes, result[v]);
  });
}

template <class K, class Access>
[[gnu::always_inline]] inline std::size_t fold_blocks(const K& kernel, Pointers dsts, Pointers srcs,
                                                      std::size_t at, std::size_t bytes,
                                                      Access access) {
  constexpr int kVectors = 4 / K::kParts;  // four chains of additions hide the latency of one
  constexpr std::size_t kBlock = kVectors * kVectorBytes;
  for (; at + kBlock <= bytes; at += kBlock) fold_block<kVectors>(kernel, dsts, srcs, at, access);
  return at;
}

// A world whose size the compiler knows has no inner loops and its pointers in registers: 1.2 times
// as fast as long as the data is in the caches.
template <int kWorld, class K>
[[gnu::always_inline]] inline std::size_t fold_world(const K& kernel, Pointers dsts, Pointers srcs,
                                                     std::size_t at, std::size_t bytes) {
  void *to[kWorld], *from[kWorld];
  for (int i = 0; i < kWorld; ++i) {
    to[i] = dsts.at[i];
    from[i] = srcs.at[i];
  }
  return fold_blocks(kernel, Pointers{to, kWorld}, Pointers{from, kWorld}, at, bytes, Whole());
}

template <class K>
[[gnu::always_inline]] inline std::size_t fold_whole(const K& kernel, Pointers dsts, Pointers srcs,
                                                     std::size_t at, std::size_t bytes) {
  if constexpr (K::kHot) {
    if (dsts.n == 2 && srcs.n == 2) return fold_world<2>(kernel, dsts, srcs, at, bytes);
    if (dsts.n == 4 && srcs.n == 4) return fold_world<4>(kernel, dsts, srcs, at, bytes);
    if (dsts.n == 8 && srcs.n == 8) return fold_world<8>(kernel, dsts, srcs, at, bytes);
  }
  return fold_blocks(kernel, dsts, srcs, at, bytes, Whole());
}

template <class K>
[[gnu::always_inline]] inline void fold_parts(const K& kernel, Pointers dsts, Pointers srcs,
                                              std::size_t at, std::size_t bytes) {
  for (; at < bytes; at += kVectorBytes) {
    const std::size_t left = bytes - at;
    fold_block<1>(kernel, dsts, srcs, at, Part(left < kVectorBytes ? left : kVectorBytes));
  }
}

// How far it is to where every destination is aligned as streamed stores need it; `bytes` or more
// if there is no such place.
inline std::size_t to_aligned(Pointers dsts, std::size_t item, std::size_t bytes) {
  const auto past = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % kVectorBytes; };
  const std::size_t head = (kVectorBytes - past(dsts.at[0])) % kVectorBytes;
  if (head % item != 0) return bytes;
  for (int d = 1; d < dsts.n; ++d)
    if (past(dsts.at[d]) != past(dsts.at[0])) return bytes;
  return head;
}

template <class T, class Op>
void fold_bytes(Pointers dsts, Pointers srcs, std::size_t bytes, const FoldOptions& options) {
  const Kernel<T, Op> kernel(options);
  std::size_t at = 0;
  if (options.non_temporal) [[unlikely]] {
    const std::size_t head = to_aligned(dsts, sizeof(T), bytes);
    if (head < bytes) {
      fold_parts(kernel, dsts, srcs, 0, head);
      at = fold_blocks(kernel, dsts, srcs, head, bytes, Streamed());
      Streamed::fence();
    }
  }
  at = fold_whole(kernel, dsts, srcs, at, bytes);
  fold_parts(kernel, dsts, srcs, at, bytes);
}

template <class T, class Op>
void fold(Pointers dsts, Pointers srcs, std::size_t count, const FoldOptions& options) {
  using Same = decltype(canonical<T, Op>());
  fold_bytes<typename Same::Type, typename Same::Operation>(dsts, srcs, count * sizeof(T), options);
}

template <class T, class Op>
constexpr Fold entry() {
  if constexpr (ReducesOn<Op, T>)
    return &fold<T, Op>;
  else
    return nullptr;
}
template <class T, class... Op>
constexpr FoldRow row(TypeList<Op...>) {
  return {{entry<T, Op>()...}};
}
template <class... T>
constexpr FoldTable table(TypeList<T...>) {
  return {{row<T>(ReduceOps{})...}};
}
constexpr FoldTable kFolds = table(DTypes{});
