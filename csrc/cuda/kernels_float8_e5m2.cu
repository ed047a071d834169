// Fold kernels for fp8 with two bits of mantissa.
#include "kernels.cuh"

namespace pycollect::cuda {

PYCOLLECT_FOLDS(Float8E5M2)

}  // namespace pycollect::cuda
