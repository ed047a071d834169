#include "gpu.h"

namespace pycollect::slabs {

Handle Gpu::handle_of(Device device, std::byte* memory) {
  const std::lock_guard lock(mutex_);
  const auto known = offered_.find(memory);
  if (known != offered_.end()) return known->second;
  auto [descriptor, bytes] = exported(device, memory);
  if (!outlet_) outlet_.emplace();
  return offered_[memory] = {outlet_->offer(std::move(descriptor)), bytes};
}

std::byte* Gpu::open(Device device, const Handle& handle) {
  return map(device, shm::fetch(handle.ticket), handle.bytes);
}

// Physical memory is gone when nobody has it mapped and no descriptor of it is left.
void Gpu::free(Device device, std::byte* memory) {
  {
    const std::lock_guard lock(mutex_);
    const auto offered = offered_.extract(memory);
    if (offered) outlet_->withdraw(offered.mapped().ticket);
  }
  release(device, memory);
}

}  // namespace pycollect::slabs
