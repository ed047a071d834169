// Combines vectors of accumulators, and divides for `avg`. Included inside the namespace of an
// instruction set (see fold_vectors.h).
#pragma once
#include "fold_elements.h"

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
