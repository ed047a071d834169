#include "driver.h"

#include <cuda_runtime_api.h>

#include "../../cuda/check.h"

namespace pycollect {
namespace {

// The version whose stream memory operations need no driver parameter to be switched on.
constexpr unsigned kDriverVersion = 11070;

}  // namespace

void* driver_entry(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult how = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050  // what there was before is deprecated, and takes the runtime's version
  cuda::check(
      cudaGetDriverEntryPointByVersion(name, &found, kDriverVersion, cudaEnableDefault, &how));
#else
  cuda::check(cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &how));
#endif
  if (how != cudaDriverEntryPointSuccess || found == nullptr)
    throw std::runtime_error(text("CUDA: this driver has no ", name));
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
