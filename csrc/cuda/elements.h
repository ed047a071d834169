// The arithmetic of the fold kernels: an element is decoded to an accumulator, combined, finished
// and encoded. The results are bit for bit those of csrc/cpu. All functions are constexpr, so that
// tests can run them on the host and compare them with the CPU's kernels.
#pragma once
#include <bit>

#include "kernels.h"
#include "thread_share.h"

namespace pycollect {

template <class T>
constexpr Complex<T> operator*(Complex<T> a, Complex<T> b) {
  return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
}

namespace cuda {

// Rounds fp32 to an 8-bit float, to nearest, ties to even. Subnormals of the 8-bit type are
// computed with normal fp32 numbers only.
template <int kMantissa, int kBias, int kMaxCode>
constexpr uint8_t narrowed(float value, Float8Specials::Codes codes) {
  constexpr int kShift = 23 - kMantissa, kRebias = (127 - kBias) << 23;
  constexpr int kMinNormal = kRebias + (1 << 23);
  constexpr int kOne = kRebias + ((kShift + 1) << 23);  // its last bit is the smallest subnormal
  const auto all = std::bit_cast<uint32_t>(value);
  const int bits = static_cast<int>(all & 0x7fffffff);
  const int even = bits + ((bits >> kShift) & 1) + ((1 << (kShift - 1)) - 1);
  const int normal = (even >> kShift) - (kRebias >> kShift);
  const int subnormal =
      std::bit_cast<int>(std::bit_cast<float>(bits) + std::bit_cast<float>(kOne)) - kOne;
  int code = bits < kMinNormal ? subnormal : normal;
  code = code > kMaxCode ? codes.overflow : code;
  code = bits == 0x7f800000 ? codes.infinity : code;
  code |= static_cast<int>(all >> 31 << 7);
  return static_cast<uint8_t>(bits > 0x7f800000 ? codes.nan : code);
}

// Arithmetic of types with one accumulator per element. `Accessor` converts between fp16 and fp32.
template <class T, class Op>
struct NumericOps {
  static constexpr bool kExtremum = Op::kOperands == Operands::ordered;
  using Integer32 = std::conditional_t<kExtremum, int32_t, uint32_t>;  // unsigned: sums wrap
  using Integer = std::conditional_t<sizeof(T) == 8,
                                     std::conditional_t<kExtremum, int64_t, uint64_t>, Integer32>;
  using Acc =
      std::conditional_t<std::integral<T>, Integer, std::conditional_t<is_narrow<T>, float, T>>;
  template <class V>
  using Lane = T;

  using Factor = std::conditional_t<std::same_as<Acc, double>, double, float>;

  // True if the fold is unrolled for common numbers of sources (see fold_known): for sums, the most
  // frequent operation, but not of one-byte elements, which are limited by arithmetic instead of
  // memory, and not of 8-byte integers, whose division needs the registers.
  static constexpr bool kHot =
      std::same_as<Op, Avg> && sizeof(T) > 1 && !(std::integral<T> && sizeof(T) == 8);
  // True if the loop over destinations is not unrolled: the 16 accumulators of a packet leave no
  // registers for several addresses.
  static constexpr bool kRolled = sizeof(T) == 1;

  Factor inverse;
  int world;
  Float8Specials float8;
  constexpr NumericOps(const ArgsHead& head, bool finishes)
      : inverse(1), world(finishes ? head.world : 1), float8(head.float8) {
    if constexpr (std::same_as<Factor, double>)
      inverse = finishes ? head.inverse : 1;
    else
      inverse = finishes ? head.inverse_f32 : 1;
  }

  template <class Accessor>
  constexpr Acc decode(const Accessor& accessor, T v) const {
    if constexpr (std::same_as<T, Half>) {
      return accessor.widened(v.bits);
    } else if constexpr (std::same_as<T, BFloat16>) {
      return std::bit_cast<float>(static_cast<uint32_t>(v.bits) << 16);
    } else if constexpr (std::same_as<T, Float8E5M2>) {  // the upper byte of an fp16
      return accessor.widened(static_cast<uint16_t>(v.bits << 8));
    } else if constexpr (std::same_as<T, Float8E4M3>) {  // as an fp16, its exponent is 8 too small
      const float scaled =
          accessor.widened(static_cast<uint16_t>((v.bits & 0x80) << 8 | (v.bits & 0x7f) << 7));
      return (v.bits & 0x7f) == 0x7f ? std::bit_cast<float>(0x7fc00000) : scaled * 256;
    } else {
      return static_cast<Acc>(v);
    }
  }

  template <class Accessor>
  constexpr T encode(const Accessor& accessor, Acc v) const {
    if constexpr (std::same_as<T, Half>) {
      return {accessor.narrowed(v)};
    } else if constexpr (std::same_as<T, BFloat16>) {
      const auto bits = std::bit_cast<uint32_t>(v);
      const uint32_t even = bits + 0x7fff + (bits >> 16 & 1);
      return {static_cast<uint16_t>(v != v ? 0x7fc0 : even >> 16)};
    } else if constexpr (std::same_as<T, Float8E5M2>) {
      return {narrowed<2, 15, 0x7b>(v, float8.e5m2)};
    } else if constexpr (std::same_as<T, Float8E4M3>) {
      return {narrowed<3, 7, 0x7e>(v, float8.e4m3)};
    } else {
      return static_cast<T>(v);
    }
  }

  static constexpr Acc combined(Acc a, Acc b) { return Op::template combined<is_float<T>>(a, b); }

  // A float that is not divided is multiplied by 1, which changes no bit of it.
  constexpr Acc finished(Acc v) const {
    if constexpr (!std::same_as<Op, Avg>) {
      return v;
    } else if constexpr (std::integral<T>) {
      using Divided = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;
      if (world == 1) return v;
      return static_cast<Acc>(static_cast<Divided>(static_cast<T>(v)) /
                              static_cast<Divided>(world));
    } else {
      return v * inverse;
    }
  }
};

// Bitwise operations, on four-byte words or on single bytes. With kBools each byte is a bool, and
// any nonzero byte is true.
template <class Op, bool kBools>
struct BitwiseOps {
  using Acc = uint32_t;
  static constexpr bool kHot = false, kRolled = false;
  template <class V>
  using Lane = std::conditional_t<std::same_as<V, Packet>, uint32_t, uint8_t>;

  constexpr BitwiseOps(const ArgsHead&, bool) {}

  template <class Accessor>
  constexpr Acc decode(const Accessor&, uint32_t v) const {
    if constexpr (kBools) return (((v & 0x7f7f7f7f) + 0x7f7f7f7f) | v) >> 7 & 0x01010101;
    return v;
  }
  template <class Accessor>
  constexpr Acc encode(const Accessor&, Acc v) const {
    return v;
  }
  static constexpr Acc combined(Acc a, Acc b) { return Op::template combined<false>(a, b); }
  constexpr Acc finished(Acc v) const { return v; }
};

template <class T, class Op>
using Arithmetic = std::conditional_t<Op::kOperands == Operands::bits,
                                      BitwiseOps<Op, std::same_as<T, Bool>>, NumericOps<T, Op>>;

inline constexpr auto kHotKernels = kernel_table<bool>([](auto kernel) {
  using K = decltype(kernel);
  return Arithmetic<typename K::Type, typename K::Operation>::kHot;
});

}  // namespace cuda
}  // namespace pycollect
