#include "gpu.h"

namespace pycollect::slabs {

std::byte* Gpu::allocate(Device device, std::size_t bytes) {
  return on(device, [&](cuda::Api& api) { return api.allocate(device, bytes); });
}

void Gpu::make_room(Device device) {
  on(device, [&](cuda::Api&) { make_room_(); });
}

Handle Gpu::handle_of(Device device, std::byte* memory) {
  const std::lock_guard lock(mutex_);
  const auto known = offered_.find(memory);
  if (known != offered_.end()) return known->second;
  auto [descriptor, bytes] = on(device, [&](cuda::Api& api) { return api.export_memory(memory); });
  if (!outlet_) outlet_.emplace();
  return offered_[memory] = {outlet_->offer(std::move(descriptor)), bytes};
}

// Physical memory is gone when nobody has it mapped and no descriptor of it is left.
void Gpu::free(Device device, std::byte* memory) {
  {
    const std::lock_guard lock(mutex_);
    const auto offered = offered_.extract(memory);
    if (offered) outlet_->withdraw(offered.mapped().ticket);
  }
  close(device, memory);
}

std::byte* Gpu::open(Device device, const Handle& handle) {
  const shm::Descriptor fetched = shm::fetch(handle.ticket);
  return on(device, [&](cuda::Api& api) { return api.map(device, fetched, handle.bytes); });
}

void Gpu::close(Device device, std::byte* opened) {
  on(device, [&](cuda::Api& api) { api.unmap(opened); });
}

std::byte* Gpu::register_host(Device device, std::byte* memory, std::size_t bytes) {
  return on(device, [&](cuda::Api& api) { return api.register_host(memory, bytes); });
}

void Gpu::unregister_host(Device device, std::byte* memory) {
  on(device, [&](cuda::Api& api) { api.unregister_host(memory); });
}

}  // namespace pycollect::slabs
