// See ipc_gpu.h: each call is one of CUDA's, or two. The driver's are asked of the runtime by name,
// so that nothing links libcuda and a driver without them is an error of the call.
#include "ipc_gpu.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>

#include "../../cuda/check.h"
#include "../../shm/system.h"
#include "beside.h"

namespace pycollect::dist {
namespace {

using cuda::check;
using slabs::Device;
using slabs::Event;
using slabs::Handle;
using slabs::Launch;
using slabs::Stream;

static_assert(sizeof(Handle) == sizeof(cudaIpcMemHandle_t));

cudaStream_t handle(Stream s) { return static_cast<cudaStream_t>(s.handle); }
cudaEvent_t handle(Event e) { return static_cast<cudaEvent_t>(e.handle); }

at::Device device_of(Device d) { return {at::kCUDA, static_cast<c10::DeviceIndex>(d)}; }

// As of CUDA 11.7: the version that needs no driver parameter to be switched on.
constexpr unsigned kDriverVersion = 11070;
using StreamValue = CUresult(CUDAAPI*)(CUstream, CUdeviceptr, cuuint64_t, unsigned int);

StreamValue driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult how = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050  // what there was before is deprecated, and takes the runtime's version
  check(cudaGetDriverEntryPointByVersion(name, &found, kDriverVersion, cudaEnableDefault, &how));
#else
  check(cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &how));
#endif
  if (how != cudaDriverEntryPointSuccess || found == nullptr)
    throw std::runtime_error(text("CUDA: this driver has no ", name));
  return reinterpret_cast<StreamValue>(found);
}

void check_driver(CUresult result, const char* call) {
  if (result != CUDA_SUCCESS)
    throw std::runtime_error(text("CUDA: ", call, " failed with error ", static_cast<int>(result)));
}

class IpcGpu final : public slabs::Gpu {
 public:
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

  std::byte* allocate(Device device, std::size_t bytes) override {
    const Beside beside(device_of(device));
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes));
    return static_cast<std::byte*>(memory);
  }
  void free(Device device, std::byte* memory) override {
    const Beside beside(device_of(device));
    check(cudaFree(memory));
  }
  Handle handle_of(Device device, std::byte* memory) override {
    const Beside beside(device_of(device));
    cudaIpcMemHandle_t given = {};
    check(cudaIpcGetMemHandle(&given, memory));
    Handle made = {};
    std::memcpy(made.data(), &given, sizeof given);
    return made;
  }
  std::byte* open(Device device, const Handle& made) override {
    const Beside beside(device_of(device));
    cudaIpcMemHandle_t given = {};
    std::memcpy(&given, made.data(), sizeof given);
    void* memory = nullptr;
    check(cudaIpcOpenMemHandle(&memory, given, cudaIpcMemLazyEnablePeerAccess));
    return static_cast<std::byte*>(memory);
  }
  void close(Device device, std::byte* opened) override {
    const Beside beside(device_of(device));
    check(cudaIpcCloseMemHandle(opened));
  }

  std::byte* adopt(Device device, std::byte* memory, std::size_t bytes) override {
    const Beside beside(device_of(device));
    check(cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped));
    void* found = nullptr;
    check(cudaHostGetDevicePointer(&found, memory, 0));
    return static_cast<std::byte*>(found);
  }
  void forsake(Device device, std::byte* memory) override {
    const Beside beside(device_of(device));
    check(cudaHostUnregister(memory));
  }

  Stream new_stream(Device device) override {
    const Beside beside(device_of(device));
    cudaStream_t made = nullptr;
    check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
    return {device, made};
  }
  void destroy(Stream stream) override {
    const Beside beside(device_of(stream.device));
    check(cudaStreamDestroy(handle(stream)));
  }
  Event record(Stream stream) override {
    const Beside beside(device_of(stream.device));
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    check(cudaEventRecord(event, handle(stream)));
    return {stream.device, event};
  }
  bool reached(Event event) override {
    const Beside beside(device_of(event.device));
    const cudaError_t state = cudaEventQuery(handle(event));
    if (state != cudaErrorNotReady) check(state);
    // No error, but it may be kept as one, and torch asks for the last error after its launches.
    if (state == cudaErrorNotReady) static_cast<void>(cudaGetLastError());
    return state == cudaSuccess;
  }
  void destroy(Event event) override { check(cudaEventDestroy(handle(event))); }

  // Writes of kernels before it are visible to whoever sees the value: the call's default.
  void write(Stream stream, std::byte* word, uint64_t value) override {
    static const StreamValue call = driver_function("cuStreamWriteValue64");
    const Beside beside(device_of(stream.device));
    check_driver(call(handle(stream), address(word), value, CU_STREAM_WRITE_VALUE_DEFAULT),
                 "cuStreamWriteValue64");
  }
  void await(Stream stream, std::byte* word, uint64_t value) override {
    static const StreamValue call = driver_function("cuStreamWaitValue64");
    const Beside beside(device_of(stream.device));
    check_driver(call(handle(stream), address(word), value, CU_STREAM_WAIT_VALUE_GEQ),
                 "cuStreamWaitValue64");
  }
  void launch(Stream stream, const Launch& launch) override {
    const Beside beside(device_of(stream.device));
    cuda::cuda_runtime().launch(stream, launch);
  }
  void fill(Stream stream, std::byte* memory, unsigned char value, std::size_t bytes) override {
    const Beside beside(device_of(stream.device));
    check(cudaMemsetAsync(memory, value, bytes, handle(stream)));
  }
  void read(Stream stream, void* host, const std::byte* memory, std::size_t bytes) override {
    const Beside beside(device_of(stream.device));
    check(cudaMemcpyAsync(host, memory, bytes, cudaMemcpyDeviceToHost, handle(stream)));
  }

 private:
  static CUdeviceptr address(std::byte* word) { return reinterpret_cast<CUdeviceptr>(word); }
};

}  // namespace

std::shared_ptr<slabs::Gpu> ipc_gpu() { return std::make_shared<IpcGpu>(); }

}  // namespace pycollect::dist
