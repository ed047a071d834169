// Memory beside torch's allocator, which keeps what tensors have left for those to come: it is
// asked to give that back before there is said to be none.
#pragma once
#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>

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

}  // namespace pycollect::dist
