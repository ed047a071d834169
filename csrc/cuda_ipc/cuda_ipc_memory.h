// CudaIpcMemory: CUDA operations for ranks that are processes. GPU memory is exported as a file
// descriptor (cuMem* calls, not cudaIpc*). Any thread may call them, whatever device is current and
// whatever other threads capture. Each throws std::runtime_error with CUDA's reason.
#pragma once
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "../bootstrap/fd_server.h"
#include "../cuda/device_guard.h"

namespace pycollect::cuda_ipc {

using cuda::Device;
using cuda::Event;
using cuda::Launch;
using cuda::Stream;

// Handle of exported GPU memory: the ticket of its offered descriptor, and its size.
struct ShareableHandle {
  ipc::FdServer::FdTicket ticket = {};
  uint64_t bytes = 0;
};

// Exported memory consists of pages of this size: other data in an exported page is exported, too.
inline constexpr std::size_t kGranule = 2 << 20;
constexpr std::size_t whole_granules(std::size_t bytes) {
  return (bytes + kGranule - 1) / kGranule * kGranule;
}

class CudaIpcMemory {
 public:
  // `empty_cache` makes the tensor allocator free its cached memory.
  CudaIpcMemory(cuda::Api& api, std::function<void()> empty_cache)
      : api_(api), empty_cache_(std::move(empty_cache)) {}
  CudaIpcMemory(const CudaIpcMemory&) = delete;
  CudaIpcMemory& operator=(const CudaIpcMemory&) = delete;

  std::string identity(Device device) { return api_.identity(device); }
  // Calls act(api) with the device current.
  template <class F>
  auto on(Device device, F&& act) {
    const cuda::CaptureModeGuard guard(api_, device);
    return act(api_);
  }

  std::byte* allocate(Device device, std::size_t bytes);
  void empty_cache(Device device);  // not from within the tensor allocator
  // Exports an allocation as a descriptor, which peers fetch from this process's fd server.
  ShareableHandle handle_of(Device device, std::byte* memory);
  void free(Device device, std::byte* memory);
  // Maps another process's memory; only once for each handle.
  std::byte* open(Device device, const ShareableHandle& handle);
  void close(Device device, std::byte* opened);

  // Registers whole pages of host memory; returns their address on the device.
  std::byte* register_host(Device device, std::byte* memory, std::size_t bytes);
  void unregister_host(Device device, std::byte* memory);

 private:
  cuda::Api& api_;
  const std::function<void()> empty_cache_;
  std::mutex mutex_;
  std::optional<ipc::FdServer> fd_server_;  // created with the first handle
  std::map<std::byte*, ShareableHandle> exported_;
};

}  // namespace pycollect::cuda_ipc
