#include "driver.h"

#include <cuda_runtime_api.h>

#include "../../cuda/check.h"

namespace pycollect {
namespace {

// The first CUDA version whose stream memory operations need no driver parameter to enable them.
constexpr unsigned kDriverVersion = 11070;

}  // namespace

void* driver_entry(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050  // deprecates cudaGetDriverEntryPoint, which uses the runtime's version
  cuda::check(
      cudaGetDriverEntryPointByVersion(name, &found, kDriverVersion, cudaEnableDefault, &status));
#else
  cuda::check(cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &status));
#endif
  if (status != cudaDriverEntryPointSuccess || found == nullptr)
    throw std::runtime_error(
        text("CUDA: this driver has no function ", name, "; update the driver"));
  return found;
}

void check_driver(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) [[likely]]
    return;
  const char* name = nullptr;
  driver_function<decltype(&cuGetErrorName)>("cuGetErrorName")(result, &name);
  throw std::runtime_error(text("CUDA: ", call, " failed with ",
                                name == nullptr ? text("error ", static_cast<int>(result)) : name));
}

}  // namespace pycollect
