// Implements cuda::Api with CUDA: each function is one or two calls of the runtime.
// Caches properties of devices, and which kernels are loaded. The current device is set through
// torch, whose MaybeSetDevice restores a device without creating a context on it.
#include "api.h"

#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>

#include "../../cuda/check.h"
#include "../../cuda/device_guard.h"
#include "../../cuda/kernel_launch.h"

namespace pycollect {
namespace {

using cuda::check;
using cuda::CopyRect;
using cuda::Device;
using cuda::Event;
using cuda::kHost;
using cuda::Launch;
using cuda::Stream;

cudaStream_t handle(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }
cudaEvent_t handle(Event event) { return static_cast<cudaEvent_t>(event.handle); }

cudaMemcpyKind kind(const CopyRect& r) {
  if (r.src_device == kHost)
    return r.dst_device == kHost ? cudaMemcpyHostToHost : cudaMemcpyHostToDevice;
  return r.dst_device == kHost ? cudaMemcpyDeviceToHost : cudaMemcpyDeviceToDevice;
}
bool crosses_devices(const CopyRect& r) {
  return r.src_device != kHost && r.dst_device != kHost && r.src_device != r.dst_device;
}

// Copies one row. Between devices it uses cudaMemcpyPeerAsync, the only call that is correct for
// memory that is mapped on one of them only. Without peer access that goes through the host.
void copy_row(cudaStream_t stream, const CopyRect& r, std::ptrdiff_t row, std::size_t bytes) {
  std::byte* const dst = r.dst + row * r.dst_pitch;
  const std::byte* const src = r.src + row * r.src_pitch;
  if (crosses_devices(r))
    check(cudaMemcpyPeerAsync(dst, r.dst_device, src, r.src_device, bytes, stream));
  else
    check(cudaMemcpyAsync(dst, src, bytes, kind(r), stream));
}

void copy_rows(cudaStream_t stream, const CopyRect& r) {
  const std::size_t dst_pitch = r.dst_pitch, src_pitch = r.src_pitch;
  if (!crosses_devices(r)) {
    check(cudaMemcpy2DAsync(r.dst, dst_pitch, r.src, src_pitch, r.bytes, r.rows, kind(r), stream));
    return;
  }
  cudaMemcpy3DPeerParms parameters = {};
  parameters.dstDevice = r.dst_device;
  parameters.srcDevice = r.src_device;
  parameters.dstPtr = {r.dst, dst_pitch, r.bytes, r.rows};
  parameters.srcPtr = {const_cast<std::byte*>(r.src), src_pitch, r.bytes, r.rows};
  parameters.extent = {r.bytes, r.rows, 1};
  check(cudaMemcpy3DPeerAsync(&parameters, stream));
}

static_assert(static_cast<int>(cuda::CaptureMode::global) == cudaStreamCaptureModeGlobal &&
              static_cast<int>(cuda::CaptureMode::thread_local_only) ==
                  cudaStreamCaptureModeThreadLocal &&
              static_cast<int>(cuda::CaptureMode::relaxed) == cudaStreamCaptureModeRelaxed);

struct CaptureInfo {
  uint64_t id = 0;  // 0: the stream is not in a capture
  cudaGraph_t graph = nullptr;
};

// A capture that has been invalidated counts as one: work on the stream fails then. The legacy
// stream is never captured, but while a blocking stream is, CUDA answers with an error.
CaptureInfo capture_info(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
  const cudaError_t error =
      cudaStreamGetCaptureInfo(handle(stream), &status, &id, &graph, nullptr, nullptr, nullptr);
#else
  const cudaError_t error =
      cudaStreamGetCaptureInfo_v2(handle(stream), &status, &id, &graph, nullptr, nullptr);
#endif
  const bool is_legacy = error == cudaErrorStreamCaptureImplicit;
  if (is_legacy) static_cast<void>(cudaGetLastError());  // torch checks it after its launches
  if (!is_legacy) check(error);
  if (is_legacy || status == cudaStreamCaptureStatusNone) return {};
  return {std::max<uint64_t>(id, 1), graph};
}

// Queries the devices on first use, not when the Api is made: a process that has no device, or
// forks before it uses one, may make an Api, too.
int multiprocessors(Device device) {
  static const std::vector<int> all = [] {
    int devices = 0;
    check(cudaGetDeviceCount(&devices));
    std::vector<int> found(devices);
    for (Device d = 0; d < devices; ++d)
      check(cudaDeviceGetAttribute(&found[d], cudaDevAttrMultiProcessorCount, d));
    return found;
  }();
  return all.at(device);
}

class CudaApi final : public cuda::Api {
 public:
  Device current_device() override {
    c10::DeviceIndex device = 0;
    check(c10::cuda::GetDevice(&device));
    return device;
  }
  // Makes a context current on the calling thread, too, which functions of the driver need. Without
  // `force` torch calls CUDA only if another device is current, and a new thread begins with device
  // 0 and no context.
  void set_device(Device device) override {
    check(c10::cuda::SetDevice(static_cast<c10::DeviceIndex>(device), /*force=*/true));
  }
  void restore_device(Device device) override {
    check(c10::cuda::MaybeSetDevice(static_cast<c10::DeviceIndex>(device)));
  }
  cuda::CaptureMode exchange_capture_mode(cuda::CaptureMode mode) override {
    auto exchanged = static_cast<cudaStreamCaptureMode>(mode);
    check(cudaThreadExchangeStreamCaptureMode(&exchanged));
    return static_cast<cuda::CaptureMode>(exchanged);
  }

  Stream create_stream(Device device) override {
    int lowest = 0, highest = 0;
    check(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest));
    return {device, stream};
  }
  uint64_t capture_id(Stream stream) override { return capture_info(stream).id; }
  void at_graph_end(Stream stream, std::function<void()> destroyed) override {
    auto owned = std::make_unique<std::function<void()>>(std::move(destroyed));
    const auto act = [](void* data) {
      const std::unique_ptr<std::function<void()>> owned(static_cast<std::function<void()>*>(data));
      (*owned)();
    };
    std::function<void()>* const function = owned.get();
    const cudaGraph_t graph = capture_info(stream).graph;
    cudaUserObject_t object = nullptr;
    check(cudaUserObjectCreate(&object, function, act, 1, cudaUserObjectNoDestructorSync));
    static_cast<void>(owned.release());  // `object` owns it now
    const cudaError_t moved = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
    if (moved != cudaSuccess) {
      *function = [] {};  // the caller keeps what `destroyed` would have released
      static_cast<void>(cudaUserObjectRelease(object, 1));
    }
    check(moved);
  }
  void synchronize(Stream stream) override { check(cudaStreamSynchronize(handle(stream))); }

  Event create_event(Device device) override {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return {device, event};
  }
  void destroy(Event event) noexcept override {
    if (cudaEventDestroy(handle(event)) != cudaSuccess) static_cast<void>(cudaGetLastError());
  }
  void record(Event event, Stream stream) override {
    check(cudaEventRecord(handle(event), handle(stream)));
  }
  void wait(Stream stream, Event event) override {
    check(cudaStreamWaitEvent(handle(stream), handle(event), 0));
  }
  bool query(Event event) override {
    const cudaError_t state = cudaEventQuery(handle(event));
    if (state != cudaErrorNotReady) check(state);
    // cudaErrorNotReady is no failure, but CUDA may store it as the last error, which torch checks
    // after its launches.
    if (state == cudaErrorNotReady) static_cast<void>(cudaGetLastError());
    return state == cudaSuccess;
  }
  void synchronize(Event event) override { check(cudaEventSynchronize(handle(event))); }

  void load(Device device, DType dtype, ReduceOp op) override {
    const std::tuple kernels(device, dtype, op);
    {
      const std::lock_guard lock(loading_);
      if (loaded_.contains(kernels)) return;
    }
    const cuda::CaptureModeGuard guard(*this, device);
    cuda::load_kernels(dtype, op);  // without the lock, because it may wait for streams
    const std::lock_guard lock(loading_);
    loaded_.insert(kernels);
  }
  void launch(Stream stream, const Launch& launch) override {
    cuda::launch_level(stream, launch, multiprocessors(stream.device));
  }
  void copy(Stream stream, const CopyRect& r) override {
    constexpr std::ptrdiff_t kMostPitch =
        std::numeric_limits<int>::max();  // the limit of all devices
    if (r.bytes == 0 || r.rows == 0) return;
    const auto bytes = static_cast<std::ptrdiff_t>(r.bytes);
    if (r.rows == 1 || (r.dst_pitch == bytes && r.src_pitch == bytes))
      return copy_row(handle(stream), r, 0, r.bytes * r.rows);
    const auto regular = [&](std::ptrdiff_t pitch) {
      return pitch >= bytes && pitch <= kMostPitch;
    };
    if (regular(r.dst_pitch) && regular(r.src_pitch)) return copy_rows(handle(stream), r);
    for (std::size_t row = 0; row < r.rows; ++row)
      copy_row(handle(stream), r, static_cast<std::ptrdiff_t>(row), r.bytes);
  }

 private:
  std::mutex loading_;
  std::set<std::tuple<Device, DType, ReduceOp>> loaded_;
};

}  // namespace

// Never destroyed, because CUDA is used after main.
cuda::Api& cuda_api() {
  static CudaApi& api = *new CudaApi;
  return api;
}

}  // namespace pycollect
