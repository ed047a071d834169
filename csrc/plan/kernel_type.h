// Maps a dtype and op to the type and operation in which a kernel really computes. Reductions that
// compute the same share a kernel: bitwise ones do not depend on the type, wrapping sums and
// products not on the sign, and a sum of complex numbers is a sum of twice as many reals.
#pragma once
#include "dtype.h"

namespace pycollect {

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
