// Which type and operation a device kernel really computes in. Kernels that would compute the same
// are one: a bit does not know its type, a sum of complex numbers is one of twice as many reals,
// and a sum is an average over one rank.
#pragma once
#include "../plan/dtype.h"

namespace pycollect::cuda {

template <class T, class Op>
struct Work {
  using Type = T;
  using Operation = Op;
};

template <class T, class Op>
constexpr auto canonical() {
  constexpr bool sums = std::same_as<Op, Sum> || std::same_as<Op, Avg>;
  if constexpr (std::same_as<T, Bool> && !is_bitwise<Op>)
    return Work<Bool, std::conditional_t<sums || std::same_as<Op, Max>, BitOr, BitAnd>>{};
  else if constexpr (is_bitwise<Op> && !std::same_as<T, Bool>)
    return Work<uint8_t, Op>{};
  else if constexpr (is_complex<T> && sums)
    return Work<decltype(T::real), Avg>{};
  else if constexpr (std::integral<T> && std::same_as<Op, Prod>)
    return Work<std::make_unsigned_t<T>, Op>{};
  else
    return Work<T, std::conditional_t<sums, Avg, Op>>{};
}

// make(Work) for every reduction of the contract; Value{} for the others.
template <class Value>
using WorkTable = std::array<std::array<Value, ReduceOps::size>, DTypes::size>;
namespace detail {
template <class Value, class T, class Op, class Make>
constexpr Value made(Make make) {
  if constexpr (ReducesOn<Op, T>)
    return make(canonical<T, Op>());
  else
    return {};
}
template <class Value, class T, class Make, class... Op>
constexpr std::array<Value, sizeof...(Op)> made_row(Make make, TypeList<Op...>) {
  return {made<Value, T, Op>(make)...};
}
template <class Value, class Make, class... T>
constexpr WorkTable<Value> made_table(Make make, TypeList<T...>) {
  return {made_row<Value, T>(make, ReduceOps{})...};
}
}  // namespace detail
template <class Value, class Make>
constexpr WorkTable<Value> work_table(Make make) {
  return detail::made_table<Value>(make, DTypes{});
}

// What a kernel counts in, and what the addresses of its scalar accesses are multiples of.
struct Unit {
  int bytes = 1, alignment = 1;
};
inline constexpr auto kUnits = work_table<Unit>([](auto work) {
  using T = typename decltype(work)::Type;
  return Unit{sizeof(T), alignof(T)};
});

}  // namespace pycollect::cuda
