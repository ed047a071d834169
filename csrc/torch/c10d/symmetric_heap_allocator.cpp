// See symmetric_heap_allocator.h.
#include "symmetric_heap_allocator.h"

#include <ATen/EmptyTensor.h>

#include <cstring>

namespace pycollect::dist {

struct SymmetricHeapAllocator::Block {
  std::shared_ptr<SymmetricHeapAllocator> owner;
  std::size_t offset;

  static void free(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    block->owner->heap_.free(block->offset);
  }
};

c10::DataPtr SymmetricHeapAllocator::allocate(std::size_t bytes) {
  auto block = std::make_unique<Block>(Block{shared_from_this(), 0});
  block->offset = heap_.allocate(bytes);
  void* const data = heap_.data() + block->offset;
  return {data, block.release(), &Block::free, c10::Device(c10::kCPU)};
}

void SymmetricHeapAllocator::copy_data(void* to, const void* from, std::size_t bytes) const {
  std::memcpy(to, from, bytes);
}

at::Tensor SymmetricHeapAllocator::empty(at::IntArrayRef sizes, at::ScalarType type) {
  return at::Tensor(at::detail::empty_generic(
      sizes, this, c10::DispatchKeySet(c10::DispatchKey::CPU), type, std::nullopt));
}

}  // namespace pycollect::dist
