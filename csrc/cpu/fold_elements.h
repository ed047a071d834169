// Vectors of kVectorBytes bytes, their loads and stores, and the conversion of each element type to
// accumulators and back. fold_<isa>.cpp includes this inside a namespace of its own, with the
// compiler set to that instruction set. So this includes nothing of std: the linker could keep a
// function compiled here as the only copy for the whole program.
#pragma once

template <class T>
struct VectorOf {
  typedef T type [[gnu::vector_size(kVectorBytes)]];
};
template <class T>
using Vector = typename VectorOf<T>::type;
using Raw = Vector<uint8_t>;

// A cast between vectors of one width keeps the bits.
template <class To, class From>
[[gnu::always_inline]] inline To as(From v) {
  return (To)v;
}

struct WholeVector {
  [[gnu::always_inline]] static Raw load(const std::byte* from) {
    Raw v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
  }
  [[gnu::always_inline]] static void store(std::byte* to, Raw v) {
    __builtin_memcpy(to, &v, sizeof v);
  }
};

// Loads and stores the first bytes of a vector. An instruction set with masks has its own.
template <int kBytes>
struct PartOfVector {
  std::size_t bytes;
  [[gnu::always_inline]] Raw load(const std::byte* from) const {
    Raw v = {};
    if (bytes == kBytes) return WholeVector::load(from);
    __builtin_memcpy(&v, from, bytes);
    return v;
  }
  [[gnu::always_inline]] void store(std::byte* to, Raw v) const {
    if (bytes == kBytes) return WholeVector::store(to, v);
    __builtin_memcpy(to, &v, bytes);
  }
};

// Converts a vector of memory to kParts vectors of accumulators, and back. The primary template is
// for types that accumulate in themselves.
template <class T>
struct Element {
  using Acc = Vector<T>;
  static constexpr int kParts = 1;
  static constexpr bool kSlow = false;
  explicit Element(const FoldOptions&) {}
  [[gnu::always_inline]] void decode(Raw raw, Acc (&to)[1]) const { to[0] = as<Acc>(raw); }
  [[gnu::always_inline]] Raw encode(const Acc (&from)[1]) const { return as<Raw>(from[0]); }
};

// Real and imaginary parts alternate; only the product treats them differently.
template <class T>
struct Element<Complex<T>> : Element<T> {
  using Element<T>::Element;
};

template <>
struct Element<Bool> {
  using Acc = Raw;
  static constexpr int kParts = 1;
  static constexpr bool kSlow = false;
  explicit Element(const FoldOptions&) {}
  [[gnu::always_inline]] void decode(Raw raw, Acc (&to)[1]) const { to[0] = as<Raw>(raw != 0) & 1; }
  [[gnu::always_inline]] Raw encode(const Acc (&from)[1]) const { return from[0]; }
};

// One accumulator vector has the low halves of the 32-bit words, and the other the high halves.
// This needs no shuffle; a fold gives the same result whatever the lane of an element.
template <>
struct Element<BFloat16> {
  using Acc = Vector<float>;
  using Words = Vector<uint32_t>;
  static constexpr int kParts = 2;
  static constexpr bool kSlow = false;
  static constexpr bool kConsecutive = false;  // true: a part has consecutive elements
  explicit Element(const FoldOptions&) {}
  [[gnu::always_inline]] void decode(Raw raw, Acc (&to)[2]) const {
    const Words words = as<Words>(raw);
    to[0] = as<Acc>(words << 16);
    to[1] = as<Acc>(words & 0xffff0000);
  }
  [[gnu::always_inline]] Raw encode(const Acc (&from)[2]) const {
    return as<Raw>((rounded(from[0]) >> 16) | (rounded(from[1]) & 0xffff0000));
  }
  [[gnu::always_inline]] static Words rounded(Acc v) {
    const Words bits = as<Words>(v), even = bits + 0x7fff + ((bits >> 16) & 1);
    return v != v ? Words{} + 0x7fc00000 : even;
  }
};

// Binary floats of up to 16 bits: a sign, an exponent, and kMantissa bits; exponent field 1 means
// 2^(1 - kBias). Subnormals of the small type are computed with normals of fp32, so that neither
// speed nor result depends on the processor's flush-to-zero mode.
template <class T, int kMantissa, int kBias, int kMaxCode, bool kInfinity>
struct SmallFloat {
  using Acc = Vector<float>;
  using Words = Vector<int32_t>;
  using Unsigned = Vector<uint32_t>;
  static constexpr int kBits = 8 * sizeof(T);
  static constexpr int kParts = 32 / kBits;  // elements in a 32-bit word
  static constexpr bool kSlow = true;        // more arithmetic than memory access
  static constexpr bool kConsecutive = false;
  static constexpr int kSign = 1 << (kBits - 1);
  static constexpr int kShift = 23 - kMantissa;
  static constexpr int kRebias = (127 - kBias) << 23;
  static constexpr int kMinNormal = kRebias + (1 << 23);
  struct SpecialCodes {
    int overflow, infinity, nan;
  };
  SpecialCodes codes;

  explicit SmallFloat(SpecialCodes c) : codes(c) {}
  [[gnu::always_inline]] void decode(Raw raw, Acc (&to)[kParts]) const {
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p)
      to[p] = widened(as<Words>(as<Unsigned>(raw) >> (p * kBits)) & (2 * kSign - 1));
  }
  [[gnu::always_inline]] Raw encode(const Acc (&from)[kParts]) const {
    Words words = {};
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) words |= narrowed(from[p]) << (p * kBits);
    return as<Raw>(words);
  }

 private:
  [[gnu::always_inline]] static Acc widened(Words code) {
    const Words magnitude = code & (kSign - 1);
    const Words normal = (magnitude << kShift) + kRebias;
    const Acc subnormal = as<Acc>(normal + (1 << 23)) - as<Acc>(Words{} + kMinNormal);
    Words bits = magnitude < (1 << kMantissa) ? as<Words>(subnormal) : normal;
    if constexpr (kInfinity)  // the exponent of infinities and NaNs is 255 in fp32
      bits = magnitude > kMaxCode ? bits + kRebias : bits;
    else
      bits = magnitude > kMaxCode ? Words{} + 0x7fc00000 : bits;
    return as<Acc>(bits | ((code & kSign) << (32 - kBits)));
  }
  [[gnu::always_inline]] Words narrowed(Acc v) const {
    constexpr int kOne = kRebias + ((kShift + 1) << 23);  // its last bit is that of a subnormal
    const Words all = as<Words>(v), bits = all & 0x7fffffff;
    const Words even = bits + ((bits >> kShift) & 1) + ((1 << (kShift - 1)) - 1);
    const Words normal = (even >> kShift) - (kRebias >> kShift);
    const Words subnormal = as<Words>(as<Acc>(bits) + as<Acc>(Words{} + kOne)) - kOne;
    Words code = bits < kMinNormal ? subnormal : normal;
    code = code > kMaxCode ? Words{} + codes.overflow : code;
    code = bits == 0x7f800000 ? Words{} + codes.infinity : code;
    code |= as<Words>(as<Unsigned>(all) >> 31) << (kBits - 1);
    return bits > 0x7f800000 ? Words{} + codes.nan : code;
  }
};

using AnyHalf = SmallFloat<Half, 10, 15, 0x7bff, true>;

template <>
struct Element<Float8E4M3> : SmallFloat<Float8E4M3, 3, 7, 0x7e, false> {
  explicit Element(const FoldOptions& o)
      : SmallFloat({o.float8.e4m3.overflow, o.float8.e4m3.infinity, o.float8.e4m3.nan}) {}
};
template <>
struct Element<Float8E5M2> : SmallFloat<Float8E5M2, 2, 15, 0x7b, true> {
  explicit Element(const FoldOptions& o)
      : SmallFloat({o.float8.e5m2.overflow, o.float8.e5m2.infinity, o.float8.e5m2.nan}) {}
};
