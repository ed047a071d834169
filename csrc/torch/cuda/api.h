// The parts of TorchRuntime for CUDA: the implementation of cuda::Api that calls CUDA, the peer
// access of this process's devices, and conversions between torch's streams and cuda::Stream.
#pragma once
#include <c10/cuda/CUDAStream.h>

#include "../../cuda/api.h"
#include "../../cuda/peer_access.h"

namespace pycollect {

// Returns the instance of this process. Its calls throw std::runtime_error with CUDA's reason.
cuda::Api& cuda_api();

cuda::PeerAccessCache& peers();

inline cuda::Stream api_stream(const c10::cuda::CUDAStream& s) {
  return {s.device_index(), s.stream()};
}
inline c10::cuda::CUDAStream torch_stream(const cuda::Stream& s) {
  return c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(s.handle),
                                          static_cast<c10::DeviceIndex>(s.device));
}

}  // namespace pycollect
