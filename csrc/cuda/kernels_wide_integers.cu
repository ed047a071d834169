// Fold kernels for integers of four and eight bytes.
#include "kernels.cuh"

namespace pycollect::cuda {

PYCOLLECT_FOLDS_BUT_PRODUCT(int32_t)
PYCOLLECT_FOLDS_BUT_PRODUCT(int64_t)
PYCOLLECT_FOLD(uint32_t, Prod)
PYCOLLECT_FOLD(uint64_t, Prod)

}  // namespace pycollect::cuda
