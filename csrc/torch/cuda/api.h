// CUDA itself.
#pragma once
#include "../../cuda/api.h"

namespace pycollect {

// Throws RuntimeError where CUDA does not work.
cuda::Api& cuda_api();

}  // namespace pycollect
