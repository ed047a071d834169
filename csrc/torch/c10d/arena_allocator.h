// torch's allocator interface over a rank's part of the group's shared memory: what lies there is
// an ordinary tensor to everybody, and collectives do not copy it.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <memory>

#include "../../shm/arena.h"

namespace pycollect::dist {

class ArenaAllocator final : public c10::Allocator,
                             public std::enable_shared_from_this<ArenaAllocator> {
 public:
  explicit ArenaAllocator(const shm::Group& group) : arena_(group) {}

  // What is handed out keeps this, and with it the memory, however long the group lives.
  c10::DataPtr allocate(std::size_t bytes) override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;

  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type);
  shm::Arena::Use use() const { return arena_.use(); }

 private:
  struct Block;
  shm::Arena arena_;
};

}  // namespace pycollect::dist
