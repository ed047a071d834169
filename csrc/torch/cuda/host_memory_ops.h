// cuda::HostMemoryOps with torch's memory and threads, and conversions between torch's streams and
// cuda::Stream.
#pragma once
#include <c10/cuda/CUDAStream.h>

#include "../../cuda/pinned_ring.h"

namespace pycollect {

cuda::HostMemoryOps& torch_host_memory_ops();

inline cuda::Stream api_stream(const c10::cuda::CUDAStream& s) {
  return {s.device_index(), s.stream()};
}
inline c10::cuda::CUDAStream torch_stream(const cuda::Stream& s) {
  return c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(s.handle),
                                          static_cast<c10::DeviceIndex>(s.device));
}

}  // namespace pycollect
