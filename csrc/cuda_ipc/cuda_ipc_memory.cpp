#include "cuda_ipc_memory.h"

namespace pycollect::cuda_ipc {

std::byte* CudaIpcMemory::allocate(Device device, std::size_t bytes) {
  return on(device, [&](cuda::Api& api) { return api.allocate(device, bytes); });
}

void CudaIpcMemory::empty_cache(Device device) {
  on(device, [&](cuda::Api&) { empty_cache_(); });
}

ShareableHandle CudaIpcMemory::handle_of(Device device, std::byte* memory) {
  const std::lock_guard lock(mutex_);
  const auto known = exported_.find(memory);
  if (known != exported_.end()) return known->second;
  auto [descriptor, bytes] = on(device, [&](cuda::Api& api) { return api.export_memory(memory); });
  if (!fd_server_) fd_server_.emplace();
  return exported_[memory] = {fd_server_->offer(std::move(descriptor)), bytes};
}

// The physical memory is freed when no process has it mapped and no descriptor of it is open.
void CudaIpcMemory::free(Device device, std::byte* memory) {
  {
    const std::lock_guard lock(mutex_);
    const auto exported = exported_.extract(memory);
    if (exported) fd_server_->withdraw(exported.mapped().ticket);
  }
  close(device, memory);
}

std::byte* CudaIpcMemory::open(Device device, const ShareableHandle& handle) {
  const ipc::UniqueFd fetched = ipc::fetch(handle.ticket);
  return on(device, [&](cuda::Api& api) { return api.map(device, fetched, handle.bytes); });
}

void CudaIpcMemory::close(Device device, std::byte* opened) {
  on(device, [&](cuda::Api& api) { api.unmap(opened); });
}

std::byte* CudaIpcMemory::register_host(Device device, std::byte* memory, std::size_t bytes) {
  return on(device, [&](cuda::Api& api) { return api.register_host(memory, bytes); });
}

void CudaIpcMemory::unregister_host(Device device, std::byte* memory) {
  on(device, [&](cuda::Api& api) { api.unregister_host(memory); });
}

}  // namespace pycollect::cuda_ipc
