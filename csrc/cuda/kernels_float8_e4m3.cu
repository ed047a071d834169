// Fold kernels for fp8 with three bits of mantissa.
#include "kernels.cuh"

namespace pycollect::cuda {

PYCOLLECT_FOLDS(Float8E4M3)

}  // namespace pycollect::cuda
