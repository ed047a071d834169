// A thread of a group works whatever others capture meanwhile: its streams are under no capture,
// but a capture forbids calls that may synchronize to all threads that do not say so. The device is
// made current because a new thread's is the first, which this process may have no use for.
#pragma once
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include "../../cuda/runtime.h"

namespace pycollect::dist {

inline at::Device device_of(cuda::Device d) {
  return {at::kCUDA, static_cast<c10::DeviceIndex>(d)};
}

class Beside {
 public:
  explicit Beside(at::Device device) : device_(device), mode_(cudaStreamCaptureModeThreadLocal) {}

 private:
  const c10::cuda::CUDAGuard device_;
  const c10::cuda::CUDAStreamCaptureModeGuard mode_;
};

}  // namespace pycollect::dist
