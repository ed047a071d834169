// Host declarations of the kernels, and compile-time tables indexed by [dtype][op], with a value
// for every reduction that has a kernel: the kernel's function, or the size of its elements.
#pragma once
#include "../plan/dtype.h"

namespace pycollect::cuda {

// [dtype][op]: make(KernelType) if the reduction is defined for the dtype; otherwise Value{}.
template <class Value>
using KernelTable = std::array<std::array<Value, ReduceOps::size>, DTypes::size>;
namespace detail {
template <class Value, class T, class Op, class Make>
constexpr Value made(Make make) {
  if constexpr (reduces_on<Op, T>)
    return make(kernel_type<T, Op, true>());
  else
    return {};
}
template <class Value, class T, class Make, class... Op>
constexpr std::array<Value, sizeof...(Op)> made_row(Make make, TypeList<Op...>) {
  return {made<Value, T, Op>(make)...};
}
template <class Value, class Make, class... T>
constexpr KernelTable<Value> made_table(Make make, TypeList<T...>) {
  return {made_row<Value, T>(make, ReduceOps{})...};
}
}  // namespace detail
template <class Value, class Make>
constexpr KernelTable<Value> kernel_table(Make make) {
  return detail::made_table<Value>(make, DTypes{});
}

// Bytes of a kernel's elements, and the alignment of its accesses to single elements.
struct UnitSize {
  int bytes = 1, alignment = 1;
};
inline constexpr auto kUnits = kernel_table<UnitSize>([](auto kernel) {
  using T = typename decltype(kernel)::Type;
  return UnitSize{sizeof(T), alignof(T)};
});

// Kernels that take KernelArgs, by op; null where no dtype computes in `T` with it. `T` and the op
// are those of a KernelType, where `avg` also stands for `sum`. Each is compiled once, in one of
// kernels_*.cu, and linking fails without an instantiation there.
struct FoldKernels {
  using ByOp = std::array<const void*, ReduceOps::size>;
  ByOp rank_order, tree_order;    // the latter null where the order changes no bits
  const void* widening_sum = {};  // in tree order, of narrow types
};
template <class T>
FoldKernels fold_kernels();
const void* copy_kernel();

}  // namespace pycollect::cuda
