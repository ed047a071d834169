#include "ipc_gpu.h"

namespace pycollect::cuda_ipc {

std::byte* IpcGpu::allocate(Device device, std::size_t bytes) {
  return on(device, [&](cuda::Api& api) { return api.allocate(device, bytes); });
}

void IpcGpu::make_room(Device device) {
  on(device, [&](cuda::Api&) { make_room_(); });
}

MemHandle IpcGpu::handle_of(Device device, std::byte* memory) {
  const std::lock_guard lock(mutex_);
  const auto known = offered_.find(memory);
  if (known != offered_.end()) return known->second;
  auto [descriptor, bytes] = on(device, [&](cuda::Api& api) { return api.export_memory(memory); });
  if (!fd_server_) fd_server_.emplace();
  return offered_[memory] = {fd_server_->offer(std::move(descriptor)), bytes};
}

// The physical memory is freed when no process has it mapped and no descriptor of it is open.
void IpcGpu::free(Device device, std::byte* memory) {
  {
    const std::lock_guard lock(mutex_);
    const auto offered = offered_.extract(memory);
    if (offered) fd_server_->withdraw(offered.mapped().ticket);
  }
  close(device, memory);
}

std::byte* IpcGpu::open(Device device, const MemHandle& handle) {
  const shm::Descriptor fetched = shm::fetch(handle.ticket);
  return on(device, [&](cuda::Api& api) { return api.map(device, fetched, handle.bytes); });
}

void IpcGpu::close(Device device, std::byte* opened) {
  on(device, [&](cuda::Api& api) { api.unmap(opened); });
}

std::byte* IpcGpu::register_host(Device device, std::byte* memory, std::size_t bytes) {
  return on(device, [&](cuda::Api& api) { return api.register_host(memory, bytes); });
}

void IpcGpu::unregister_host(Device device, std::byte* memory) {
  on(device, [&](cuda::Api& api) { api.unregister_host(memory); });
}

}  // namespace pycollect::cuda_ipc
