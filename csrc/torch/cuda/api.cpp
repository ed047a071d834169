// CUDA itself: each call is one of the runtime's or the driver's, or two. Keeps nothing but what
// the devices are. Devices change through torch, which begins no context of a device that is only
// gone back to.
#include "api.h"

#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <limits>

#include "../../cuda/check.h"
#include "../../cuda/launch.h"
#include "driver.h"
#include "shareable_memory.h"

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

// Between devices by the call for peers, the only one that is right for memory which is mapped into
// one of them alone; it works without peer access, through the host.
void copy_line(cudaStream_t stream, const CopyRect& r, std::ptrdiff_t line, std::size_t bytes) {
  std::byte* const dst = r.dst + line * r.dst_pitch;
  const std::byte* const src = r.src + line * r.src_pitch;
  if (crosses_devices(r))
    check(cudaMemcpyPeerAsync(dst, r.dst_device, src, r.src_device, bytes, stream));
  else
    check(cudaMemcpyAsync(dst, src, bytes, kind(r), stream));
}

void copy_lines(cudaStream_t stream, const CopyRect& r) {
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

using StreamValue = CUresult(CUDAAPI*)(CUstream, CUdeviceptr, cuuint64_t, unsigned int);

void on_word(StreamValue call, const char* name, Stream stream, std::byte* word, uint64_t value,
             unsigned int how) {
  check_driver(call(handle(stream), reinterpret_cast<CUdeviceptr>(word), value, how), name);
}

struct Properties {
  cuda::Limits limits;
  bool flushes;  // can a wait be told to see to what other GPUs wrote?
};

std::vector<Properties> ask_all_devices() {
  // Parameters beyond 4 KiB came with CUDA 12.1, whatever this was built with.
  int driver = 0, devices = 0;
  check(cudaDriverGetVersion(&driver));
  check(cudaGetDeviceCount(&devices));
  const std::size_t bytes = driver >= 12010 ? sizeof(cuda::LargeTable) : sizeof(cuda::SmallTable);
  std::vector<Properties> all;
  for (Device device = 0; device < devices; ++device) {
    int multiprocessors = 0, flushes = 0;
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    check(cudaDeviceGetAttribute(&flushes, cudaDevAttrCanFlushRemoteWrites, device));
    all.push_back({{multiprocessors, bytes}, flushes != 0});
  }
  return all;
}

// Asked when a device is first used: a process that has none, or that forks before it uses one, may
// have this object nevertheless.
const Properties& of_device(Device device) {
  static const std::vector<Properties> all = ask_all_devices();
  return all.at(device);
}

class Cuda final : public cuda::Api {
 public:
  Device current_device() override {
    c10::DeviceIndex device = 0;
    check(c10::cuda::GetDevice(&device));
    return device;
  }
  void set_device(Device device) override {
    check(c10::cuda::SetDevice(static_cast<c10::DeviceIndex>(device)));
  }
  void restore_device(Device device) override {
    check(c10::cuda::MaybeSetDevice(static_cast<c10::DeviceIndex>(device)));
  }
  // Its number on the bus is the same in all processes, and so is that of a part of it.
  std::string identity(Device device) override {
    cudaDeviceProp properties = {};
    check(cudaGetDeviceProperties(&properties, device));
    std::string number;
    for (std::size_t i = 0; i < sizeof properties.uuid.bytes; i += sizeof(uint64_t)) {
      uint64_t part = 0;
      std::memcpy(&part, properties.uuid.bytes + i, sizeof part);
      number += shm::hexadecimal(part);
    }
    return number;
  }
  cuda::CaptureMode exchange_capture_mode(cuda::CaptureMode mode) override {
    using cuda::CaptureMode;
    cudaStreamCaptureMode exchanged = mode == CaptureMode::global
                                          ? cudaStreamCaptureModeGlobal
                                          : cudaStreamCaptureModeThreadLocal;
    check(cudaThreadExchangeStreamCaptureMode(&exchanged));
    return exchanged == cudaStreamCaptureModeGlobal ? CaptureMode::global
                                                    : CaptureMode::thread_local_only;
  }

  Stream create_stream(Device device) override {
    cudaStream_t made = nullptr;
    check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
    return {device, made};
  }
  void destroy(Stream stream) override { check(cudaStreamDestroy(handle(stream))); }
  bool is_capturing(Stream stream) override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(handle(stream), &status));
    return status != cudaStreamCaptureStatusNone;
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
    // No error, but it may be kept as one, and torch asks for the last error after its launches.
    if (state == cudaErrorNotReady) static_cast<void>(cudaGetLastError());
    return state == cudaSuccess;
  }
  void synchronize(Event event) override { check(cudaEventSynchronize(handle(event))); }

  void launch(Stream stream, const Launch& launch) override {
    cuda::launch_level(stream, launch, of_device(stream.device).limits);
  }
  void copy(Stream stream, const CopyRect& r) override {
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
  void fill(Stream stream, std::byte* memory, unsigned char value, std::size_t bytes) override {
    check(cudaMemsetAsync(memory, value, bytes, handle(stream)));
  }
  // Writes of kernels before it are visible to whoever sees the value: the call's default.
  void write_value(Stream stream, std::byte* word, uint64_t value) override {
    constexpr const char* kName = "cuStreamWriteValue64";
    static const auto call = driver_function<StreamValue>(kName);
    on_word(call, kName, stream, word, value, CU_STREAM_WRITE_VALUE_DEFAULT);
  }
  // What other GPUs have written before it is there as well, where a device has to see to that.
  void wait_value(Stream stream, std::byte* word, uint64_t value) override {
    constexpr const char* kName = "cuStreamWaitValue64";
    static const auto call = driver_function<StreamValue>(kName);
    const unsigned int flush = of_device(stream.device).flushes ? CU_STREAM_WAIT_VALUE_FLUSH : 0;
    on_word(call, kName, stream, word, value, CU_STREAM_WAIT_VALUE_GEQ | flush);
  }

  std::byte* allocate(Device device, std::size_t bytes) override {
    return allocate_shareable(device, bytes);
  }
  cuda::Exported export_memory(std::byte* memory) override { return export_shareable(memory); }
  std::byte* map(Device device, const shm::Descriptor& memory, std::size_t bytes) override {
    return map_shareable(device, memory, bytes);
  }
  // Unlike cudaFree, on which torch counts, the driver's call does not wait for who is still there.
  void unmap(std::byte* memory) override {
    check(cudaDeviceSynchronize());
    unmap_shareable(memory);
  }

  std::byte* register_host(std::byte* memory, std::size_t bytes) override {
    check(cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped));
    void* found = nullptr;
    check(cudaHostGetDevicePointer(&found, memory, 0));
    return static_cast<std::byte*>(found);
  }
  void unregister_host(std::byte* memory) override { check(cudaHostUnregister(memory)); }
};

}  // namespace

// Outlives main, as CUDA does.
cuda::Api& cuda_api() {
  static Cuda& api = *new Cuda;
  return api;
}

}  // namespace pycollect
