// Fold kernels for integers of one and two bytes.
#include "kernels.cuh"

namespace pycollect::cuda {

PYCOLLECT_FOLDS_BUT_PRODUCT(int8_t)
PYCOLLECT_FOLDS(uint8_t)
PYCOLLECT_FOLDS_BUT_PRODUCT(int16_t)
PYCOLLECT_FOLD(uint16_t, Prod)

}  // namespace pycollect::cuda
