// What ranks that are processes do with CUDA, from any thread, whatever device is current and
// whatever other threads capture. Each call throws std::runtime_error with CUDA's reason.
#pragma once
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "../cuda/current_device.h"
#include "../shm/outlet.h"

namespace pycollect::slabs {

using cuda::Device;
using cuda::Event;
using cuda::Launch;
using cuda::Stream;

// With which another process opens memory: where it fetches a descriptor of it, and how much that
// is.
struct Handle {
  shm::Outlet::Ticket ticket = {};
  uint64_t bytes = 0;
};

// CUDA gives memory to other processes in such pages: what shares one with something else gives
// that away as well.
inline constexpr std::size_t kGranule = 2 << 20;
constexpr std::size_t whole_granules(std::size_t bytes) {
  return (bytes + kGranule - 1) / kGranule * kGranule;
}

class Gpu {
 public:
  // `make_room` has whoever allocates tensors give back what it keeps for those to come.
  Gpu(cuda::Api& api, std::function<void()> make_room)
      : api_(api), make_room_(std::move(make_room)) {}
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  std::string identity(Device device) { return api_.identity(device); }
  // Work for a device, begun with it current: act(api).
  template <class F>
  auto on(Device device, F&& act) {
    const cuda::Beside beside(api_, device);
    return act(api_);
  }

  std::byte* allocate(Device device, std::size_t bytes);
  void make_room(Device device);  // not from within what allocates tensors
  // What was allocated goes to other processes as a file descriptor, which they fetch from this
  // process's outlet.
  Handle handle_of(Device device, std::byte* memory);
  void free(Device device, std::byte* memory);
  std::byte* open(Device device, const Handle& handle);  // of another process; once
  void close(Device device, std::byte* opened);

  // Whole pages of the host's memory; returns where the device finds them.
  std::byte* register_host(Device device, std::byte* memory, std::size_t bytes);
  void unregister_host(Device device, std::byte* memory);

 private:
  cuda::Api& api_;
  const std::function<void()> make_room_;
  std::mutex mutex_;
  std::optional<shm::Outlet> outlet_;  // from the first handle on
  std::map<std::byte*, Handle> offered_;
};

}  // namespace pycollect::slabs
