// Defines every element type and every reduction in one place: the lists below determine the enums,
// the kernel tables of host and device, and which pairs are refused. To add one, add it to a list
// (and its arithmetic to cpu/ and cuda/). The types here only store bits: the kernels convert
// narrow floats to float.
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

// The order of the enums is the order of the lists.
enum class DType : uint8_t {
  f64,
  f32,
  f16,
  bf16,
  f8e4m3,
  f8e5m2,
  i8,
  i16,
  i32,
  i64,
  u8,
  boolean,
  c64,
  c128
};
using DTypes = TypeList<double, float, Half, BFloat16, Float8E4M3, Float8E5M2, int8_t, int16_t,
                        int32_t, int64_t, uint8_t, Bool, Complex<float>, Complex<double>>;
static_assert(DTypes::size == static_cast<std::size_t>(DType::c128) + 1);

enum class ReduceOp : uint8_t { sum, avg, prod, min, max, band, bor, bxor };
struct Sum {};
struct Avg {};
struct Prod {};
struct Min {};
struct Max {};
struct BitAnd {};
struct BitOr {};
struct BitXor {};
using ReduceOps = TypeList<Sum, Avg, Prod, Min, Max, BitAnd, BitOr, BitXor>;
static_assert(ReduceOps::size == static_cast<std::size_t>(ReduceOp::bxor) + 1);

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
inline constexpr bool is_bitwise =
    std::same_as<Op, BitAnd> || std::same_as<Op, BitOr> || std::same_as<Op, BitXor>;
template <class Op>
inline constexpr bool is_extremum = std::same_as<Op, Min> || std::same_as<Op, Max>;

// Reductions that the contract allows: no bitwise ones on floats and complex numbers, no min and
// max of complex numbers, and no average of bools.
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
inline constexpr std::array kAllDTypeNames{
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int16",
    "int32", "int64", "uint8", "bool", "complex64", "complex128",
    // Only moved.
    "uint16", "uint32", "uint64", "complex32", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu", "float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2",
    "int1", "int2", "int3", "int4", "int5", "int6", "int7", "uint1", "uint2", "uint3", "uint4",
    "uint5", "uint6", "uint7", "bcomplex32"};
inline constexpr std::span kDTypeNames = std::span(kAllDTypeNames).first<DTypes::size>();
inline constexpr std::array<const char*, ReduceOps::size> kReduceOpNames{
    "sum", "avg", "prod", "min", "max", "band", "bor", "bxor"};
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
