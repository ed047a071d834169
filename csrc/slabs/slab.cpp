#include "slab.h"

namespace pycollect::slabs {
namespace {

// The device may have the memory, kept for tensors that are yet to come.
std::byte* allocate(Gpu& gpu, Device device, std::size_t bytes) {
  try {
    return gpu.allocate(device, bytes);
  } catch (const std::runtime_error&) {  // whatever it is, the second attempt says it
    gpu.make_room(device);
    return gpu.allocate(device, bytes);
  }
}

}  // namespace

Slab::Slab(Gpu& gpu, const SlabTerms& terms) : gpu_(gpu), terms_(terms), memory_(terms.world) {
  memory_[terms.rank] = allocate(gpu_, terms.device, whole_granules(kHead + 2 * terms.slot_bytes));
}

Slab::~Slab() {
  if (abandoned_) return;
  for (Rank r = 0; r < terms_.world; ++r) {
    try {
      if (r == terms_.rank)
        gpu_.free(terms_.device, memory_[r]);
      else if (memory_[r] != nullptr)
        gpu_.close(terms_.device, memory_[r]);
    } catch (...) {  // the device is broken, and its memory is gone with it
    }
  }
}

void Slab::open(Rank r, const Handle& handle) { memory_[r] = gpu_.open(terms_.device, handle); }

}  // namespace pycollect::slabs
