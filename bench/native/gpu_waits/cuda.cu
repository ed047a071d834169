// Device of the wait probe on CUDA. The stream memory operations of the driver are looked up at run
// time, so that the program starts without a driver, and prints why it cannot run.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstring>
#include <string>

#include "device.h"

namespace gpu_waits {
namespace {

constexpr int kThreads = 256, kMostBlocks = 132;
// Size of a GPU page. Shared memory is allocated in whole pages: a page has no other data.
constexpr std::size_t kPage = 2 << 20;
constexpr int kMostSums = 16;

void check(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(result));
}

void check(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS)
    throw std::runtime_error(std::string(what) + ": CUDA driver error " + std::to_string(result));
}

struct Sources {
  Word* of[kMostSums];
  int n;
};

__global__ void fill_words(Word* words, std::size_t count, Word value) {
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x)
    words[i] = value;
}

__global__ void copy_words(Word* to, const Word* from, std::size_t count) {
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x)
    to[i] = from[i];
}

__global__ void sum_words(const __grid_constant__ Sources from, std::size_t count) {
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x) {
    Word sum = 0;
    for (int r = 0; r < from.n; ++r) sum += from.of[r][i];
    for (int r = 0; r < from.n; ++r) from.of[r][i] = sum;
  }
}

__global__ void compare_words(const Word* words, std::size_t count, Word wanted, Word* wrong) {
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x)
    if (words[i] != wanted) atomicAdd(reinterpret_cast<unsigned long long*>(wrong), 1ull);
}

unsigned blocks(std::size_t count) {
  const std::size_t wanted = (count + kThreads - 1) / kThreads;
  return static_cast<unsigned>(wanted < kMostBlocks ? wanted : kMostBlocks);
}

template <class Function>
Function driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status = {};
  // The CUDA 12.0 version of the function, which every driver that can run this program has.
  check(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &status), name);
  if (status != cudaDriverEntryPointSuccess)
    throw std::runtime_error(std::string("the CUDA driver has no ") + name +
                             "; CUDA 12.0 or newer is needed");
  return reinterpret_cast<Function>(found);
}

class Cuda final : public Device {
 public:
  Cuda()
      : write_(driver_function<decltype(write_)>("cuStreamWriteValue64")),
        wait_(driver_function<decltype(wait_)>("cuStreamWaitValue64")) {}

  Word* allocate(std::size_t words) override {
    void* at = nullptr;
    const std::size_t bytes = (words * sizeof(Word) + kPage - 1) / kPage * kPage;
    check(cudaMalloc(&at, bytes), "cudaMalloc");
    check(cudaMemset(at, 0, bytes), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    return static_cast<Word*>(at);
  }
  Handle share(Word* at) override {
    cudaIpcMemHandle_t exported;
    check(cudaIpcGetMemHandle(&exported, at), "cudaIpcGetMemHandle");
    Handle handle;
    static_assert(sizeof exported == sizeof handle);
    std::memcpy(handle.data(), &exported, sizeof exported);
    return handle;
  }
  Word* open(const Handle& handle) override {
    cudaIpcMemHandle_t ipc_handle;
    std::memcpy(&ipc_handle, handle.data(), sizeof ipc_handle);
    void* at = nullptr;
    check(cudaIpcOpenMemHandle(&at, ipc_handle, cudaIpcMemLazyEnablePeerAccess),
          "cudaIpcOpenMemHandle");
    return static_cast<Word*>(at);
  }
  Word* pin(void* host, std::size_t bytes) override {
    check(cudaHostRegister(host, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable),
          "cudaHostRegister");
    void* at = nullptr;
    check(cudaHostGetDevicePointer(&at, host, 0), "cudaHostGetDevicePointer");
    return static_cast<Word*>(at);
  }

  Stream new_stream() override {
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    return stream;
  }
  void synchronize(Stream stream) override {
    check(cudaStreamSynchronize(of(stream)), "cudaStreamSynchronize");
  }
  bool is_done(Stream stream) override {
    const cudaError_t found = cudaStreamQuery(of(stream));
    if (found != cudaErrorNotReady) check(found, "cudaStreamQuery");
    if (found == cudaErrorNotReady) cudaGetLastError();  // clear it for the next launch's check
    return found == cudaSuccess;
  }

  Event new_event(Handle& handle) override {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess),
          "cudaEventCreate");
    cudaIpcEventHandle_t ipc_handle;
    check(cudaIpcGetEventHandle(&ipc_handle, event), "cudaIpcGetEventHandle");
    static_assert(sizeof ipc_handle == sizeof handle);
    std::memcpy(handle.data(), &ipc_handle, sizeof ipc_handle);
    return event;
  }
  Event open_event(const Handle& handle) override {
    cudaIpcEventHandle_t ipc_handle;
    std::memcpy(&ipc_handle, handle.data(), sizeof ipc_handle);
    cudaEvent_t opened = nullptr;
    check(cudaIpcOpenEventHandle(&opened, ipc_handle), "cudaIpcOpenEventHandle");
    return opened;
  }
  void record(Event event, Stream stream) override {
    check(cudaEventRecord(static_cast<cudaEvent_t>(event), of(stream)), "cudaEventRecord");
  }
  void wait_event(Stream stream, Event event) override {
    check(cudaStreamWaitEvent(of(stream), static_cast<cudaEvent_t>(event), 0),
          "cudaStreamWaitEvent");
  }

  void write(Stream stream, Word* at, Word value) override {
    check(write_(of(stream), address(at), value, CU_STREAM_WRITE_VALUE_DEFAULT),
          "cuStreamWriteValue64");
  }
  void wait(Stream stream, Word* at, Word least) override {
    check(wait_(of(stream), address(at), least, CU_STREAM_WAIT_VALUE_GEQ), "cuStreamWaitValue64");
  }

  void copy(Stream stream, void* to, const void* from, std::size_t bytes) override {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, of(stream)), "cudaMemcpyAsync");
  }
  void fill(Stream stream, Word* words, std::size_t count, Word value) override {
    fill_words<<<blocks(count), kThreads, 0, of(stream)>>>(words, count, value);
    check(cudaGetLastError(), "fill");
  }
  void copy_by_kernel(Stream stream, Word* to, const Word* from, std::size_t count) override {
    copy_words<<<blocks(count), kThreads, 0, of(stream)>>>(to, from, count);
    check(cudaGetLastError(), "copy");
  }
  void sum(Stream stream, const std::vector<Word*>& words, std::size_t count) override {
    Sources from = {};
    from.n = static_cast<int>(words.size());
    std::copy(words.begin(), words.end(), from.of);
    sum_words<<<blocks(count), kThreads, 0, of(stream)>>>(from, count);
    check(cudaGetLastError(), "sum");
  }
  void compare(Stream stream, const Word* words, std::size_t count, Word wanted,
               Word* wrong) override {
    compare_words<<<blocks(count), kThreads, 0, of(stream)>>>(words, count, wanted, wrong);
    check(cudaGetLastError(), "compare");
  }

 private:
  static cudaStream_t of(Stream stream) { return static_cast<cudaStream_t>(stream); }
  static CUdeviceptr address(Word* at) { return reinterpret_cast<CUdeviceptr>(at); }

  CUresult (*const write_)(CUstream, CUdeviceptr, cuuint64_t, unsigned);
  CUresult (*const wait_)(CUstream, CUdeviceptr, cuuint64_t, unsigned);
};

}  // namespace

void prepare() {}

std::unique_ptr<Device> make_device() {
  int count = 0;
  const cudaError_t found = cudaGetDeviceCount(&count);
  if (found != cudaSuccess || count == 0)
    throw NoDevice(std::string("there is no GPU to probe here: ") +
                   (found != cudaSuccess ? cudaGetErrorString(found) : "no device was found"));
  check(cudaSetDevice(0), "cudaSetDevice");
  check(cudaFree(nullptr), "creation of the CUDA context");
  return std::make_unique<Cuda>();
}

}  // namespace gpu_waits
