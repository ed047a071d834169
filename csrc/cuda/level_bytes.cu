// What knows bytes only: bit operations, truths and copies.
#include "level.cuh"

namespace pycollect::cuda {

template Kernel fold_kernel<uint8_t, BitAnd>();
template Kernel fold_kernel<uint8_t, BitOr>();
template Kernel fold_kernel<uint8_t, BitXor>();
template Kernel fold_kernel<Bool, BitAnd>();
template Kernel fold_kernel<Bool, BitOr>();
template Kernel fold_kernel<Bool, BitXor>();

Kernel copy_kernel() {
  return {reinterpret_cast<const void*>(&copy_level<SmallTable>),
          reinterpret_cast<const void*>(&copy_level<LargeTable>)};
}

}  // namespace pycollect::cuda
