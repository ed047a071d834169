#include "gpus.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "../plan/error.h"

namespace pycollect {
namespace {

// Never destroyed, because a device is used after main.
struct GpuCallsByType {
  std::mutex mutex;
  std::map<c10::DeviceType, std::shared_ptr<GpuCalls>> calls;

  GpuCallsByType() {
    if (auto cuda = torch_runtime())
      calls.emplace(at::kCUDA, std::make_shared<GpuCalls>(std::move(cuda), at::kCUDA));
  }
};

GpuCallsByType& gpu_calls_by_type() {
  static GpuCallsByType& one = *new GpuCallsByType;
  return one;
}

GpuCalls* find(c10::DeviceType type) {
  GpuCallsByType& all = gpu_calls_by_type();
  const std::lock_guard lock(all.mutex);
  const auto found = all.calls.find(type);
  return found == all.calls.end() ? nullptr : found->second.get();
}

}  // namespace

bool has_cuda() { return find(at::kCUDA) != nullptr; }
bool supports(const at::Device& device) {
  return device.is_cpu() || find(device.type()) != nullptr;
}

GpuCalls& gpu_calls(c10::DeviceType type) {
  GpuCalls* const found = find(type);
  if (found == nullptr)
    throw std::logic_error(text("this build has no calls on ", c10::DeviceTypeName(type, true)));
  return *found;
}

void set_runtime(c10::DeviceType type, std::shared_ptr<TorchRuntime> runtime) {
  std::shared_ptr<GpuCalls> calls;
  if (runtime != nullptr) calls = std::make_shared<GpuCalls>(std::move(runtime), type);
  const std::lock_guard lock(gpu_calls_by_type().mutex);
  auto& known = gpu_calls_by_type().calls[type];
  known.swap(calls);
  if (known == nullptr) gpu_calls_by_type().calls.erase(type);
}

namespace {

bool reaches(at::Device from, at::Device to) {
  return gpu_calls(from.type()).runtime().reaches(from, to);
}

}  // namespace

Topology topology_of(const DeviceList& devices, bool peer_access) {
  if (!peer_access) return Topology::staged;
  if (std::all_of(devices.begin(), devices.end(), [&](at::Device d) { return d == devices[0]; }))
    return Topology::shared;
  DeviceList distinct;  // each device once: there may be many ranks on few devices
  for (at::Device d : devices)
    if (std::find(distinct.begin(), distinct.end(), d) == distinct.end()) distinct.push_back(d);
  for (at::Device from : distinct)
    for (at::Device to : distinct)
      if (from.is_cpu() || to.is_cpu() || !reaches(from, to)) return Topology::staged;
  return Topology::peers;
}

// Ranks on the host reach nothing directly, because they execute nothing; copies access their
// memory.
MemoryReach memory_reach_of(const DeviceList& devices, bool peer_access) {
  MemoryReach memory_reach{{}, std::vector(devices.size(), std::vector<bool>(devices.size()))};
  for (std::size_t r = 0; r < devices.size(); ++r) {
    memory_reach.on_host.push_back(devices[r].is_cpu());
    for (std::size_t of = 0; of < devices.size(); ++of)
      memory_reach.directly[r][of] =
          r == of || (peer_access && !devices[r].is_cpu() && !devices[of].is_cpu() &&
                      reaches(devices[r], devices[of]));
  }
  return memory_reach;
}

void on_stream_of(const Streams& streams, Rank rank, c10::function_ref<void()> act) {
  const auto r = static_cast<std::size_t>(rank);
  if (r >= streams.size() || !streams[r]) return act();
  TorchRuntime& runtime = gpu_calls(streams[r]->device_type()).runtime();
  runtime.with_streams(runtime.stream_of(*streams[r]), act);
}

at::Tensor new_bytes_on_gpu(int64_t bytes, at::Device device) {
  return gpu_calls(device.type()).runtime().empty({bytes}, at::kByte, device);
}

// The device is current because torch checks its current stream for a capture.
at::Tensor new_pinned_bytes(int64_t bytes, at::Device device) {
  TorchRuntime& runtime = gpu_calls(device.type()).runtime();
  const cuda::CaptureModeGuard guard(runtime.cuda(), device.index());
  return runtime.empty_pinned({bytes}, at::kByte);
}

}  // namespace pycollect
