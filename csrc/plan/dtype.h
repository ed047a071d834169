// Defines every element type and every reduction in one place: the two tables below determine the
// enums, the names, the kernel tables of host and device, and which pairs are refused
// (docs/adding-an-algorithm.md). The types here only store bits: the kernels convert narrow floats
// to float.
#pragma once
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace pycollect {

template <class... Ts>
struct TypeList {
  static constexpr std::size_t size = sizeof...(Ts);
};

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct Float8E4M3 {
  uint8_t bits;
};  // torch.float8_e4m3fn
struct Float8E5M2 {
  uint8_t bits;
};
struct Bool {
  uint8_t byte;
};  // any byte but zero is true
template <class T>
struct Complex {
  T real, imag;
};

// The element types: enumerator, type of the stored bits, name in torch, and torch's ScalarType.
#define PYCOLLECT_DTYPES(ROW)                             \
  ROW(f64, double, "float64", Double)                     \
  ROW(f32, float, "float32", Float)                       \
  ROW(f16, Half, "float16", Half)                         \
  ROW(bf16, BFloat16, "bfloat16", BFloat16)               \
  ROW(f8e4m3, Float8E4M3, "float8_e4m3fn", Float8_e4m3fn) \
  ROW(f8e5m2, Float8E5M2, "float8_e5m2", Float8_e5m2)     \
  ROW(i8, int8_t, "int8", Char)                           \
  ROW(i16, int16_t, "int16", Short)                       \
  ROW(i32, int32_t, "int32", Int)                         \
  ROW(i64, int64_t, "int64", Long)                        \
  ROW(u8, uint8_t, "uint8", Byte)                         \
  ROW(boolean, Bool, "bool", Bool)                        \
  ROW(c64, Complex<float>, "complex64", ComplexFloat)     \
  ROW(c128, Complex<double>, "complex128", ComplexDouble)

// The reductions: enumerator, which is also the name, type, kind, the reduction that it is on
// bools, and how it combines the accumulators a and b, which on the host are vectors. The product
// of complex numbers is in cpu/fold_ops.h and cuda/elements.h.
#define PYCOLLECT_REDUCE_OPS(ROW)                        \
  ROW(sum, Sum, Numeric, BitOr, (a + b))                 \
  ROW(avg, Avg, Numeric, BitOr, (a + b))                 \
  ROW(prod, Prod, Numeric, BitAnd, (a * b))              \
  ROW(min, Min, Extremum, BitAnd, PYCOLLECT_A_IF(a < b)) \
  ROW(max, Max, Extremum, BitOr, PYCOLLECT_A_IF(a > b))  \
  ROW(band, BitAnd, Bitwise, BitAnd, (a & b))            \
  ROW(bor, BitOr, Bitwise, BitOr, (a | b))               \
  ROW(bxor, BitXor, Bitwise, BitXor, (a ^ b))

// One of a and b; NaN propagates. A comparison of integers with themselves would cost time.
#define PYCOLLECT_A_IF(condition) \
  (kHaveNaN ? ((condition) | (a != a) ? a : b) : ((condition) ? a : b))

struct Numeric {};
struct Extremum {};  // not defined for complex numbers
struct Bitwise {};   // neither for floats
struct BitAnd;
struct BitOr;
#define PYCOLLECT_REDUCTION(name, type, kind, bools, combined) \
  struct type : kind {                                         \
    using OnBools = bools;                                     \
  };
PYCOLLECT_REDUCE_OPS(PYCOLLECT_REDUCTION)
#undef PYCOLLECT_REDUCTION
// Statements of a function of two accumulators a and b, which return them combined by Op. The
// function has a constant kHaveNaN.
#define PYCOLLECT_RETURN_COMBINED(name, type, kind, bools, combined) \
  if constexpr (std::is_same_v<Op, type>) return combined;

namespace detail {
template <class, class... Ts>
using Rest = TypeList<Ts...>;
}  // namespace detail

#define PYCOLLECT_ENUMERATOR(name, ...) name,
#define PYCOLLECT_TYPE(name, type, ...) , type
enum class DType : uint8_t { PYCOLLECT_DTYPES(PYCOLLECT_ENUMERATOR) };
enum class ReduceOp : uint8_t { PYCOLLECT_REDUCE_OPS(PYCOLLECT_ENUMERATOR) };
using DTypes = detail::Rest<void PYCOLLECT_DTYPES(PYCOLLECT_TYPE)>;
using ReduceOps = detail::Rest<void PYCOLLECT_REDUCE_OPS(PYCOLLECT_TYPE)>;
#undef PYCOLLECT_ENUMERATOR
#undef PYCOLLECT_TYPE

template <class T>
inline constexpr bool is_complex = false;
template <class T>
inline constexpr bool is_complex<Complex<T>> = true;
// Floats that are narrower than their accumulator: a partial sum that goes through memory in such a
// type is rounded once too often.
template <class T>
inline constexpr bool is_narrow = std::same_as<T, Half> || std::same_as<T, BFloat16> ||
                                  std::same_as<T, Float8E4M3> || std::same_as<T, Float8E5M2>;
template <class T>
inline constexpr bool is_float = std::floating_point<T> || is_narrow<T>;
template <class Op>
inline constexpr bool is_bitwise = std::derived_from<Op, Bitwise>;
template <class Op>
inline constexpr bool is_extremum = std::derived_from<Op, Extremum>;

// Reductions that the contract allows.
template <class Op, class T>
concept ReducesOn =
    !(is_bitwise<Op> && (is_float<T> || is_complex<T>)) && !(is_extremum<Op> && is_complex<T>) &&
    !(std::same_as<Op, Avg> && std::same_as<T, Bool>);

namespace detail {
template <class Op, class T>
inline constexpr bool reduces_on = ReducesOn<Op, T>;  // nvcc loses packs of concepts
struct TypeFacts {
  std::size_t bytes;
  bool accumulates_in_itself, is_integer;
  std::array<bool, ReduceOps::size> reduces;
};
template <class T, class... Op>
constexpr TypeFacts facts(TypeList<Op...>) {
  return {sizeof(T),
          !is_narrow<T>,
          std::is_integral_v<T> || std::same_as<T, Bool>,
          {reduces_on<Op, T>...}};
}
template <class... T>
constexpr std::array<TypeFacts, sizeof...(T)> all_facts(TypeList<T...>) {
  return {facts<T>(ReduceOps{})...};
}
inline constexpr auto kFacts = all_facts(DTypes{});
}  // namespace detail

constexpr std::size_t item_bytes(DType t) {
  return detail::kFacts[static_cast<std::size_t>(t)].bytes;
}
constexpr bool accumulates_in_itself(DType t) {
  return detail::kFacts[static_cast<std::size_t>(t)].accumulates_in_itself;
}
// Returns whether a reduction has the same bits in any order.
constexpr bool is_integer(DType t) {
  return detail::kFacts[static_cast<std::size_t>(t)].is_integer;
}
// Returns the dtype that holds accumulators without rounding: the dtype itself, or float32.
constexpr DType accumulator(DType t) { return accumulates_in_itself(t) ? t : DType::f32; }
constexpr bool reduces(DType t, ReduceOp op) {
  return detail::kFacts[static_cast<std::size_t>(t)].reduces[static_cast<std::size_t>(op)];
}

// Names of the dtypes, and after them those of torch's dtypes that have no reduction. Ranks agree
// on a dtype by its index here, also where the data moves as that of another type of as many bytes.
#define PYCOLLECT_NAME(enumerator, type, name, scalar) name,
inline constexpr std::array kAllDTypeNames{PYCOLLECT_DTYPES(PYCOLLECT_NAME)
                                           // Only moved.
                                           "uint16",
                                           "uint32",
                                           "uint64",
                                           "complex32",
                                           "float8_e4m3fnuz",
                                           "float8_e5m2fnuz",
                                           "float8_e8m0fnu",
                                           "float4_e2m1fn_x2",
                                           "bits8",
                                           "bits16",
                                           "bits1x8",
                                           "bits2x4",
                                           "bits4x2",
                                           "int1",
                                           "int2",
                                           "int3",
                                           "int4",
                                           "int5",
                                           "int6",
                                           "int7",
                                           "uint1",
                                           "uint2",
                                           "uint3",
                                           "uint4",
                                           "uint5",
                                           "uint6",
                                           "uint7",
                                           "bcomplex32"};
#undef PYCOLLECT_NAME
inline constexpr std::span kDTypeNames = std::span(kAllDTypeNames).first<DTypes::size>();
#define PYCOLLECT_NAME(name, ...) #name,
inline constexpr std::array kReduceOpNames{PYCOLLECT_REDUCE_OPS(PYCOLLECT_NAME)};
#undef PYCOLLECT_NAME
constexpr const char* name(DType t) { return kDTypeNames[static_cast<std::size_t>(t)]; }
constexpr const char* name(ReduceOp op) { return kReduceOpNames[static_cast<std::size_t>(op)]; }

// How the installed torch converts a float that an 8-bit type cannot hold: the bytes for a positive
// finite overflow, for +infinity and for NaN (the sign is or-ed in, except to a NaN).
// Probed once at import, because torch 2.11 gives NaN for 1000 in e4m3fn and 2.13 gives 448.
struct Float8Specials {
  struct Codes {
    uint8_t overflow, infinity, nan;
  };
  Codes e4m3{0x7f, 0x7f, 0x7f}, e5m2{0x7c, 0x7c, 0x7f};
};

// The parameters of a fold besides its pointers.
struct FoldOptions {
  int world = 1;              // the divisor of `avg`
  bool non_temporal = false;  // the destinations are large and will not be read soon
  Float8Specials float8 = {};
};

}  // namespace pycollect
