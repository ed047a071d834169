// Fold kernels for fp16 and bf16.
#include "kernels.cuh"

namespace pycollect::cuda {

PYCOLLECT_FOLDS(Half)
PYCOLLECT_FOLDS(BFloat16)

}  // namespace pycollect::cuda
