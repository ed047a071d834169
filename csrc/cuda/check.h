// Turns CUDA errors into exceptions that name the source line of the call.
#pragma once
#include <cuda_runtime_api.h>

#include <source_location>
#include <stdexcept>
#include <string_view>

#include "../plan/error.h"

namespace pycollect::cuda {

// Throws std::runtime_error unless `error` is cudaSuccess. Clears CUDA's last error, so that no
// later check of another caller reports it again.
inline void check(cudaError_t error, std::source_location at = std::source_location::current()) {
  if (error == cudaSuccess) [[likely]]
    return;
  static_cast<void>(cudaGetLastError());
  const std::string_view path = at.file_name();
  throw std::runtime_error(text("CUDA: ", cudaGetErrorString(error), " (", cudaGetErrorName(error),
                                ", at ", path.substr(path.rfind('/') + 1), ":", at.line(), ")"));
}

}  // namespace pycollect::cuda
