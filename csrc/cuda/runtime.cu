// The real Runtime: the executor's eleven calls, made to CUDA. Keeps nothing but what the devices
// are.
#include <limits>
#include <vector>

#include "check.h"
#include "launch.h"
#include "runtime.h"

namespace pycollect::cuda {
namespace {

cudaStream_t handle(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }
cudaEvent_t handle(Event event) { return static_cast<cudaEvent_t>(event.handle); }

cudaMemcpyKind kind(const Rectangle& r) {
  if (r.src_device == kHost)
    return r.dst_device == kHost ? cudaMemcpyHostToHost : cudaMemcpyHostToDevice;
  return r.dst_device == kHost ? cudaMemcpyDeviceToHost : cudaMemcpyDeviceToDevice;
}
bool crosses_devices(const Rectangle& r) {
  return r.src_device != kHost && r.dst_device != kHost && r.src_device != r.dst_device;
}

// Between devices by the call for peers, the only one that is right for memory which is mapped into
// one of them alone; it works without peer access, through the host.
void copy_line(cudaStream_t stream, const Rectangle& r, std::ptrdiff_t line, std::size_t bytes) {
  std::byte* const dst = r.dst + line * r.dst_pitch;
  const std::byte* const src = r.src + line * r.src_pitch;
  if (crosses_devices(r))
    check(cudaMemcpyPeerAsync(dst, r.dst_device, src, r.src_device, bytes, stream));
  else
    check(cudaMemcpyAsync(dst, src, bytes, kind(r), stream));
}

void copy_lines(cudaStream_t stream, const Rectangle& r) {
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

class CudaRuntime final : public Runtime {
 public:
  CudaRuntime() {
    // Parameters beyond 4 KiB came with CUDA 12.1, whatever this was built with.
    int driver = 0, devices = 0;
    check(cudaDriverGetVersion(&driver));
    check(cudaGetDeviceCount(&devices));
    const std::size_t bytes = driver >= 12010 ? sizeof(LargeTable) : sizeof(SmallTable);
    for (Device device = 0; device < devices; ++device) {
      int multiprocessors = 0;
      check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
      limits_.push_back({multiprocessors, bytes});
    }
  }

  Device current_device() override {
    Device device = 0;
    check(cudaGetDevice(&device));
    return device;
  }
  void set_device(Device device) override { check(cudaSetDevice(device)); }

  Event create_event(Device device) override {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return {device, event};
  }
  void destroy_event(Event event) noexcept override {
    if (cudaEventDestroy(handle(event)) != cudaSuccess) static_cast<void>(cudaGetLastError());
  }
  void record(Event event, Stream stream) override {
    check(cudaEventRecord(handle(event), handle(stream)));
  }
  void wait(Stream stream, Event event) override {
    check(cudaStreamWaitEvent(handle(stream), handle(event), 0));
  }

  void launch(Stream stream, const Launch& launch) override {
    launch_level(stream, launch, limits_.at(stream.device));
  }

  void copy(Stream stream, const Rectangle& r) override {
    constexpr std::ptrdiff_t kMostPitch = std::numeric_limits<int>::max();  // of every device
    if (r.bytes == 0 || r.rows == 0) return;
    const auto bytes = static_cast<std::ptrdiff_t>(r.bytes);
    if (r.rows == 1 || (r.dst_pitch == bytes && r.src_pitch == bytes))
      return copy_line(handle(stream), r, 0, r.bytes * r.rows);
    const auto regular = [&](std::ptrdiff_t pitch) {
      return pitch >= bytes && pitch <= kMostPitch;
    };
    if (regular(r.dst_pitch) && regular(r.src_pitch)) return copy_lines(handle(stream), r);
    for (std::size_t line = 0; line < r.rows; ++line)
      copy_line(handle(stream), r, static_cast<std::ptrdiff_t>(line), r.bytes);
  }

  bool is_capturing(Stream stream) override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(handle(stream), &status));
    return status != cudaStreamCaptureStatusNone;
  }
  void synchronize(Stream stream) override { check(cudaStreamSynchronize(handle(stream))); }
  void synchronize(Event event) override { check(cudaEventSynchronize(handle(event))); }

 private:
  std::vector<Limits> limits_;  // [device]
};

}  // namespace

Runtime& cuda_runtime() {
  static CudaRuntime runtime;
  return runtime;
}

}  // namespace pycollect::cuda
