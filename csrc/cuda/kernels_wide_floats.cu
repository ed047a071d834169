// Fold kernels for fp64 and fp32, for the parts of complex numbers, and for complex products.
#include "kernels.cuh"

namespace pycollect::cuda {

PYCOLLECT_FOLDS(double)
PYCOLLECT_FOLDS(float)
PYCOLLECT_FOLD(Complex<float>, Prod)
PYCOLLECT_FOLD(Complex<double>, Prod)

}  // namespace pycollect::cuda
