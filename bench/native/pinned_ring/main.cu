// Times the library's pinned staging ring, which copies pageable host memory, with other sizes:
// bytes per piece and number of pieces, in both directions. Prints lines of JSON. The exit status
// without a GPU is 77.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>

#include "../../../csrc/cuda/pinned_ring.h"

namespace {

using namespace pycollect::cuda;

constexpr int kNoDevice = 77, kRepeats = 7;
constexpr std::size_t KiB = 1 << 10, MiB = 1 << 20;

void check(cudaError_t result, const char* what) {
  if (result != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(result));
}

// The CUDA calls that a copy through the ring needs; all others throw.
class CopyApi final : public Api {
 public:
  Device current_device() override { return 0; }
  void set_device(Device device) override { check(cudaSetDevice(device), "cudaSetDevice"); }
  void restore_device(Device device) override { set_device(device); }
  Event create_event(Device device) override {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    return {device, event};
  }
  void destroy(Event event) noexcept override { cudaEventDestroy(of(event)); }
  void record(Event event, Stream stream) override {
    check(cudaEventRecord(of(event), of(stream)), "cudaEventRecord");
  }
  void copy(Stream stream, const CopyRect& r) override {
    check(cudaMemcpyAsync(r.dst, r.src, r.bytes * r.rows, cudaMemcpyDefault, of(stream)),
          "cudaMemcpyAsync");
  }
  void synchronize(Stream stream) override {
    check(cudaStreamSynchronize(of(stream)), "cudaStreamSynchronize");
  }
  void synchronize(Event event) override {
    check(cudaEventSynchronize(of(event)), "cudaEventSynchronize");
  }

  std::string identity(Device) override { unused(); }
  CaptureMode exchange_capture_mode(CaptureMode) override { unused(); }
  Stream create_stream(Device) override { unused(); }
  void destroy(Stream) override { unused(); }
  uint64_t capture_id(Stream) override { unused(); }
  void at_graph_end(Stream, std::function<void()>) override { unused(); }
  void load(Device, pycollect::DType, pycollect::ReduceOp) override { unused(); }
  void wait(Stream, Event) override { unused(); }
  bool query(Event) override { unused(); }
  void launch(Stream, const Launch&) override { unused(); }
  void fill(Stream, std::byte*, unsigned char, std::size_t) override { unused(); }
  void write_value(Stream, std::byte*, uint64_t) override { unused(); }
  void wait_value(Stream, std::byte*, uint64_t) override { unused(); }
  std::byte* allocate(Device, std::size_t) override { unused(); }
  ExportedMemory export_memory(std::byte*) override { unused(); }
  std::byte* map(Device, const pycollect::ipc::UniqueFd&, std::size_t) override { unused(); }
  void unmap(std::byte*) override { unused(); }
  std::byte* register_host(std::byte*, std::size_t) override { unused(); }
  void unregister_host(std::byte*) override { unused(); }

 private:
  [[noreturn]] static void unused() {
    throw std::logic_error("copies through the ring do not use this call");
  }
  static cudaStream_t of(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }
  static cudaEvent_t of(Event event) { return static_cast<cudaEvent_t>(event.handle); }
};

// Copies host memory with as many OpenMP threads as torch would use.
class OpenMpHostMemoryOps final : public HostMemoryOps {
 public:
  std::byte* new_pinned(std::size_t bytes) override {
    void* at = nullptr;
    check(cudaHostAlloc(&at, bytes, cudaHostAllocDefault), "cudaHostAlloc");
    return static_cast<std::byte*>(at);
  }
  void copy(const CopyRect& r) override {
    const auto bytes = static_cast<int64_t>(r.bytes * r.rows);
    constexpr int64_t kGrain = 128 << 10;  // bytes that a thread copies at once, as in the library
#pragma omp parallel for schedule(static)
    for (int64_t at = 0; at < bytes; at += kGrain)
      std::memcpy(r.dst + at, r.src + at, std::min(kGrain, bytes - at));
  }
};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class Run>
double median_us(Run run) {
  run();
  double seconds[kRepeats];
  for (double& s : seconds) {
    const double begin = now();
    run();
    s = now() - begin;
  }
  std::nth_element(seconds, seconds + kRepeats / 2, seconds + kRepeats);
  return seconds[kRepeats / 2] * 1e6;
}

struct Memory {
  std::byte *device, *pageable, *pinned;
};

CopyRect copy_between(const Memory& m, std::byte* host, std::size_t bytes, bool to_device) {
  const auto pitch = static_cast<std::ptrdiff_t>(bytes);
  if (to_device) return {m.device, host, pitch, pitch, bytes, 1, 0, kHost};
  return {host, m.device, pitch, pitch, bytes, 1, kHost, 0};
}

void measure(CopyApi& api, Stream stream, const Memory& memory, std::size_t bytes, bool to_device) {
  const double pinned = median_us([&] {
    api.copy(stream, copy_between(memory, memory.pinned, bytes, to_device));
    api.synchronize(stream);
  });
  const double pageable = median_us([&] {
    api.copy(stream, copy_between(memory, memory.pageable, bytes, to_device));
    api.synchronize(stream);
  });
  for (std::size_t piece = 256 * KiB; piece <= 8 * MiB; piece *= 2)
    for (int pieces : {2, 4, 8}) {
      OpenMpHostMemoryOps host;
      PinnedRing ring(api, host, {piece, pieces});
      DeviceGuard device(api);
      const double us = median_us([&] {
        ring.copy(device, stream, copy_between(memory, memory.pageable, bytes, to_device));
        ring.drain(device);
        api.synchronize(stream);
      });
      const bool is_library =
          piece == PinnedRingSize{}.piece_bytes && pieces == PinnedRingSize{}.pieces;
      std::printf("{\"question\": \"ring\", \"enters\": %s, \"bytes\": %zu, \"piece\": %zu",
                  to_device ? "true" : "false", bytes, piece);
      std::printf(", \"pieces\": %d, \"us\": %.2f, \"pinned_us\": %.2f, \"pageable_us\": %.2f",
                  pieces, us, pinned, pageable);
      std::printf(", \"library\": %s}\n", is_library ? "true" : "false");
    }
}

void run() {
  constexpr std::size_t kLargestBytes = 256 * MiB;
  CopyApi api;
  api.set_device(0);
  Memory memory = {};
  void* at = nullptr;
  check(cudaMalloc(&at, kLargestBytes), "cudaMalloc");
  memory.device = static_cast<std::byte*>(at);
  memory.pinned = OpenMpHostMemoryOps().new_pinned(kLargestBytes);
  std::vector<std::byte> pageable(kLargestBytes);
  memory.pageable = pageable.data();
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  for (std::size_t bytes : {1 * MiB, 16 * MiB, kLargestBytes})
    for (bool to_device : {true, false}) measure(api, {0, stream}, memory, bytes, to_device);
}

}  // namespace

int main() {
  int count = 0;
  if (const cudaError_t found = cudaGetDeviceCount(&count); found != cudaSuccess || count == 0) {
    std::printf("there is no GPU to copy to here: %s\n", cudaGetErrorString(found));
    return kNoDevice;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // keeps the printed lines if killed midway
  try {
    run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "pinned_ring: %s\n", error.what());
    return 1;
  }
  return 0;
}
