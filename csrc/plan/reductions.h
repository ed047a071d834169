// The table of reductions: a row says everything about one, for the vectors of the host and the
// numbers of a GPU. Names, checks and kernels follow from it. This is compiled once for each
// instruction set of the host (see cpu/fold_elements.h), so it includes only types of std, and has
// no functions but those that are always inline.
#pragma once
#include <cstdint>
#include <type_traits>

namespace pycollect {

// What a reduction takes: numbers; numbers that have an order, which excludes complex ones; or
// bits, which excludes floats too.
enum class Operands : uint8_t { numbers, ordered, bits };

struct BitAnd {
  static constexpr const char* kName = "band";
  static constexpr auto kOperands = Operands::bits;
  using OnBools = BitAnd;  // the same reduction of bools, as an operation on bits; void: none
  // `kFloat`: the operands are floats, which may be NaN.
  template <bool kFloat, class V>
  [[gnu::always_inline]] static constexpr V combined(V a, V b) {
    return a & b;
  }
};

struct BitOr {
  static constexpr const char* kName = "bor";
  static constexpr auto kOperands = Operands::bits;
  using OnBools = BitOr;
  template <bool kFloat, class V>
  [[gnu::always_inline]] static constexpr V combined(V a, V b) {
    return a | b;
  }
};

struct BitXor {
  static constexpr const char* kName = "bxor";
  static constexpr auto kOperands = Operands::bits;
  using OnBools = BitXor;
  template <bool kFloat, class V>
  [[gnu::always_inline]] static constexpr V combined(V a, V b) {
    return a ^ b;
  }
};

struct Sum {
  static constexpr const char* kName = "sum";
  static constexpr auto kOperands = Operands::numbers;
  using OnBools = BitOr;
  template <bool kFloat, class V>
  [[gnu::always_inline]] static constexpr V combined(V a, V b) {
    return a + b;
  }
};

struct Avg : Sum {  // whose sum the kernels divide
  static constexpr const char* kName = "avg";
  using OnBools = void;
};

struct Prod {
  static constexpr const char* kName = "prod";
  static constexpr auto kOperands = Operands::numbers;
  using OnBools = BitAnd;
  template <bool kFloat, class V>
  [[gnu::always_inline]] static constexpr V combined(V a, V b) {
    return a * b;
  }
};

// NaN propagates. The comparison stands in the conditional itself: GCC knows an integer minimum and
// maximum only in that form.
struct Min {
  static constexpr const char* kName = "min";
  static constexpr auto kOperands = Operands::ordered;
  using OnBools = BitAnd;
  template <bool kFloat, class V>
  [[gnu::always_inline]] static constexpr V combined(V a, V b) {
    if constexpr (kFloat) return (a < b) | (a != a) ? a : b;
    return a < b ? a : b;
  }
};

struct Max {
  static constexpr const char* kName = "max";
  static constexpr auto kOperands = Operands::ordered;
  using OnBools = BitOr;
  template <bool kFloat, class V>
  [[gnu::always_inline]] static constexpr V combined(V a, V b) {
    if constexpr (kFloat) return (a > b) | (a != a) ? a : b;
    return a > b ? a : b;
  }
};

template <class... Ts>
struct TypeList {
  static constexpr unsigned size = sizeof...(Ts);
};

// The rows, in the order of the enum. The first ones are torch's ReduceOps, in torch's order.
using ReduceOps = TypeList<Sum, Avg, Prod, Min, Max, BitAnd, BitOr, BitXor>;
enum class ReduceOp : uint8_t { sum, avg, prod, min, max, band, bor, bxor };
static_assert(ReduceOps::size == static_cast<unsigned>(ReduceOp::bxor) + 1);

}  // namespace pycollect
