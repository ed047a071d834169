// See ipc_gpu.h: each call is one of CUDA's, or two.
#include "ipc_gpu.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include <cstring>

#include "../../cuda/check.h"
#include "../../shm/system.h"
#include "beside.h"
#include "descriptor_memory.h"
#include "driver.h"

namespace pycollect::dist {
namespace {

using cuda::check;
using slabs::Device;
using slabs::Event;
using slabs::Launch;
using slabs::Stream;

cudaStream_t handle(Stream s) { return static_cast<cudaStream_t>(s.handle); }
cudaEvent_t handle(Event e) { return static_cast<cudaEvent_t>(e.handle); }

using StreamValue = CUresult(CUDAAPI*)(CUstream, CUdeviceptr, cuuint64_t, unsigned int);

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
    return memory_.allocate(device, bytes);
  }
  void make_room(Device device) override {
    const Beside beside(device_of(device));
    c10::cuda::CUDACachingAllocator::emptyCache();
  }
  void close(Device device, std::byte* opened) override { memory_.unmap(device, opened); }

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
    static const auto call = driver_function<StreamValue>("cuStreamWriteValue64");
    const Beside beside(device_of(stream.device));
    check_driver(call(handle(stream), address(word), value, CU_STREAM_WRITE_VALUE_DEFAULT),
                 "cuStreamWriteValue64");
  }
  void await(Stream stream, std::byte* word, uint64_t value) override {
    static const auto call = driver_function<StreamValue>("cuStreamWaitValue64");
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

 protected:
  Exported exported(Device device, std::byte* memory) override {
    return {memory_.descriptor_of(device, memory), memory_.bytes_of(memory)};
  }
  std::byte* map(Device device, const shm::Descriptor& memory, std::size_t bytes) override {
    return memory_.map(device, memory, bytes);
  }
  void release(Device device, std::byte* memory) override { memory_.release(device, memory); }

 private:
  static CUdeviceptr address(std::byte* word) { return reinterpret_cast<CUdeviceptr>(word); }

  DescriptorMemory memory_;
};

}  // namespace

std::shared_ptr<slabs::Gpu> ipc_gpu() { return std::make_shared<IpcGpu>(); }

}  // namespace pycollect::dist
