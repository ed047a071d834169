// The table of element types, and what follows from it and from the table of reductions: names,
// which pairs are refused, and which share a kernel. A type here only stores bits; its arithmetic
// is in cpu/fold_elements.h and cuda/elements.h, and cuda/kernels_*.cu name it.
#pragma once
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>
#include <type_traits>

#include "reductions.h"

namespace pycollect {

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
// A row of the table of dtypes: the element type, and torch's name.
template <class T>
struct DTypeRow {
  const char* name;
  constexpr operator const char*() const { return name; }
};
// In the order of the enum.
inline constexpr std::tuple kDTypeTable{
    DTypeRow<double>{"float64"},
    DTypeRow<float>{"float32"},
    DTypeRow<Half>{"float16"},
    DTypeRow<BFloat16>{"bfloat16"},
    DTypeRow<Float8E4M3>{"float8_e4m3fn"},
    DTypeRow<Float8E5M2>{"float8_e5m2"},
    DTypeRow<int8_t>{"int8"},
    DTypeRow<int16_t>{"int16"},
    DTypeRow<int32_t>{"int32"},
    DTypeRow<int64_t>{"int64"},
    DTypeRow<uint8_t>{"uint8"},
    DTypeRow<Bool>{"bool"},
    DTypeRow<Complex<float>>{"complex64"},
    DTypeRow<Complex<double>>{"complex128"},
};
static_assert(std::tuple_size_v<decltype(kDTypeTable)> == static_cast<unsigned>(DType::c128) + 1);
// Names of torch's dtypes that have no reduction and are only moved.
inline constexpr std::array kMovedDTypeNames{
    // Elements of whole bytes.
    "uint16", "uint32", "uint64", "complex32", "bcomplex32", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu", "bits8", "bits16",
    // Parts of a byte.
    "float4_e2m1fn_x2", "bits1x8", "bits2x4", "bits4x2", "int1", "int2", "int3", "int4", "int5",
    "int6", "int7", "uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7"};

namespace detail {
template <class... T>
TypeList<T...> types(const std::tuple<DTypeRow<T>...>&);
}  // namespace detail
using DTypes = decltype(detail::types(kDTypeTable));  // the element types

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
// Reductions that the contract allows: no bitwise ones on floats and complex numbers, no min and
// max of complex numbers, and no average of bools.
template <class Op, class T>
inline constexpr bool reduces_on =
    std::same_as<T, Bool> ? !std::is_void_v<typename Op::OnBools>
    : is_complex<T>       ? Op::kOperands == Operands::numbers
                          : Op::kOperands != Operands::bits || !is_float<T>;

// Whether a fold in another order has other bits, which it has if operations round. Of operands
// that are equal as numbers, or NaN, `min` and `max` take the same one however they are bracketed.
template <class T, class Op>
inline constexpr bool order_matters_on =
    (is_float<T> || is_complex<T>) && Op::kOperands == Operands::numbers;

namespace detail {
struct TypeFacts {
  std::size_t bytes;
  bool accumulates_in_itself, is_integer;
  std::array<bool, ReduceOps::size> reduces, order_matters;
};
template <class T, class... Op>
constexpr TypeFacts facts(TypeList<Op...>) {
  return {sizeof(T),
          !is_narrow<T>,
          std::is_integral_v<T> || std::same_as<T, Bool>,
          {reduces_on<Op, T>...},
          {order_matters_on<T, Op>...}};
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
constexpr bool order_matters(DType t, ReduceOp op) {
  return detail::kFacts[static_cast<std::size_t>(t)].order_matters[static_cast<std::size_t>(op)];
}

namespace detail {
template <class... Op>
constexpr std::array<const char*, sizeof...(Op)> op_names(TypeList<Op...>) {
  return {Op::kName...};
}
}  // namespace detail
// Ranks agree on a dtype by its index here, also where the data moves as that of another type of as
// many bytes.
inline constexpr auto kAllDTypeNames =
    std::apply([](auto... name) { return std::array<const char*, sizeof...(name)>{name...}; },
               std::tuple_cat(kDTypeTable, kMovedDTypeNames));
inline constexpr std::span kDTypeNames = std::span(kAllDTypeNames).first<DTypes::size>();
inline constexpr auto kReduceOpNames = detail::op_names(ReduceOps{});
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

// The canonical orders in which a fold combines its sources.
enum class FoldOrder : uint8_t {
  rank,  // ((x0 + x1) + x2) + ...
  tree,  // balanced: the left half has the largest power of two below the number of sources
};
inline constexpr std::array kFoldOrderNames{"rank", "tree"};
constexpr const char* name(FoldOrder o) { return kFoldOrderNames[static_cast<std::size_t>(o)]; }

// Returns the number of sources in the left half of a tree of n >= 2.
constexpr int left_half(int n) {
  int half = 1;
  while (2 * half < n) half *= 2;
  return half;
}
// Up to this number of sources, the tree is the left fold.
inline constexpr int kSameInBothOrders = 3;
// The parameters of a fold besides its pointers.
struct FoldOptions {
  int world = 1;              // the divisor of `avg`
  bool non_temporal = false;  // the destinations are large and will not be read soon
  FoldOrder order = FoldOrder::rank;
  bool widens = false;  // the destinations are accumulators of a narrow type: float32, not rounded
  Float8Specials float8 = {};
};

// Maps a dtype and op to the type and operation in which a kernel really computes. Reductions that
// compute the same share a kernel: bitwise ones do not depend on the type, wrapping sums and
// products not on the sign, and a sum of complex numbers is a sum of twice as many reals.
template <class T, class Op>
struct KernelType {
  using Type = T;
  using Operation = Op;
};

// `kSumsDivide`: a sum is computed as an average over one rank, as the device's kernels do.
template <class T, class Op, bool kSumsDivide>
constexpr auto kernel_type() {
  constexpr bool products = std::is_same_v<Op, Prod>;
  using Same = std::conditional_t<std::is_same_v<Op, Sum> && kSumsDivide, Avg, Op>;
  if constexpr (std::is_same_v<T, Bool>)
    return KernelType<Bool, typename Op::OnBools>{};
  else if constexpr (Op::kOperands == Operands::bits)
    return KernelType<uint8_t, Op>{};
  else if constexpr (std::is_integral_v<T> && (products || std::is_same_v<Same, Sum>))
    return KernelType<std::make_unsigned_t<T>, Op>{};
  else if constexpr (is_complex<T> && !products)
    return KernelType<decltype(T::real), Same>{};
  else
    return KernelType<T, Same>{};
}

// Whether the device computes some reduction of some dtype as `Op` on elements of type T.
namespace detail {
template <class K, class T, class... Op>
constexpr bool computes(TypeList<Op...>) {
  return (std::is_same_v<decltype(kernel_type<T, Op, true>()), K> || ...);
}
template <class K, class... T>
constexpr bool any_computes(TypeList<T...>) {
  return (computes<K, T>(ReduceOps{}) || ...);
}
}  // namespace detail
template <class T, class Op>
inline constexpr bool is_kernel_type = detail::any_computes<KernelType<T, Op>>(DTypes{});

template <class T, class... Ts>
constexpr unsigned index_of(TypeList<Ts...>) {
  unsigned i = 0;
  (void)((std::is_same_v<T, Ts> || (++i, false)) || ...);
  return i;
}

}  // namespace pycollect
