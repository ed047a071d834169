// The implementation of cuda::Api that calls CUDA.
#pragma once
#include "../../cuda/api.h"

namespace pycollect {

// Returns the instance of this process. Its calls throw std::runtime_error with CUDA's reason.
cuda::Api& cuda_api();

}  // namespace pycollect
