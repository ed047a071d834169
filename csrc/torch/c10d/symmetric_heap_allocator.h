// torch's allocator interface to a rank's part of the symmetric heap. A tensor allocated there is
// an ordinary tensor, which collectives access without a copy.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <memory>

#include "../../group/symmetric_heap.h"

namespace pycollect::dist {

class SymmetricHeapAllocator final : public c10::Allocator,
                                     public std::enable_shared_from_this<SymmetricHeapAllocator> {
 public:
  explicit SymmetricHeapAllocator(const ipc::Group& group) : heap_(group) {}

  // The returned memory keeps this allocator and the mapping alive, even after the group is gone.
  c10::DataPtr allocate(std::size_t bytes) override {
    const std::size_t offset = heap_.allocate(bytes);
    const auto free = [owner = shared_from_this(), offset](void*) { owner->heap_.free(offset); };
    return c10::InefficientStdFunctionContext::makeDataPtr(heap_.data() + offset, free, at::kCPU);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type) {
    return at::Tensor(at::detail::empty_generic(
        sizes, this, c10::DispatchKeySet(c10::DispatchKey::CPU), type, std::nullopt));
  }
  ipc::SymmetricHeap::HeapUsage usage() const { return heap_.usage(); }

 private:
  ipc::SymmetricHeap heap_;
};

}  // namespace pycollect::dist
