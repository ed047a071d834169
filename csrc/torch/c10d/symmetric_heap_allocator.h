// torch's allocator interface to a rank's part of the symmetric heap. A tensor allocated there is
// an ordinary tensor, which collectives access without a copy.
#pragma once
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
  c10::DataPtr allocate(std::size_t bytes) override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;

  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type);
  ipc::SymmetricHeap::HeapUsage usage() const { return heap_.usage(); }

 private:
  struct Block;
  ipc::SymmetricHeap heap_;
};

}  // namespace pycollect::dist
