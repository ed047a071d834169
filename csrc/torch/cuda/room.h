// Memory beside torch's allocator, which keeps what tensors have left for those to come: it is
// asked to give that back before there is said to be none. With no lock of ours, because it has its
// own, under which it may be asking us for memory.
#pragma once
#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>

#include "../../plan/error.h"
#include "../../slabs/gpu.h"

namespace pycollect::dist {

// What `ask` answers, at the second attempt if the first one's answer is `no_room`.
template <class Ask, class Answer>
Answer with_room(const Ask& ask, Answer no_room) {
  const Answer first = ask();
  if (first != no_room) return first;
  static_cast<void>(cudaGetLastError());
  c10::cuda::CUDACachingAllocator::emptyCache();
  return ask();
}

inline void require_room(bool is_there, slabs::Device device, std::size_t bytes) {
  if (!is_there)
    throw slabs::NoRoom(text("CUDA: cuda:", device, " has no room for ", bytes, " bytes"));
}

}  // namespace pycollect::dist
