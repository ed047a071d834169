// Measures the rate of the reduction kernel relative to a copy on the device, L2 hot and cold, for
// different constants: bytes per access, loads in flight, blocks per multiprocessor, waves of a
// grid. Prints lines of JSON. The exit status without a GPU is 77. The tensor of each rank becomes
// the mean of all, in place, as in all-reduce on one memory. This moves 2 x world x bytes, like the
// reference copy of world x bytes. Also measures what a launch costs by the bytes of its arguments.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.cuh"

namespace {

using namespace folds;
using pycollect::cuda::kBlocksPerSm;
using pycollect::cuda::kInFlight;
using pycollect::cuda::kPacketBytes;

// Must equal the constant of csrc/cuda/split_launch.cpp, which is private.
constexpr int kWaves = 4;
constexpr int kRepeats = 15, kNoDevice = 77;
// Launches in a row, per timed run: as many as can be issued twice before the delay ends.
constexpr int kLaunches = 8;
// Length of the delay kernel: long enough that all later work is issued before it ends.
constexpr long long kDelayCycles = 100'000;

void check(cudaError_t result, const char* what) {
  if (result != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(result));
}

__global__ void set_all(uint32_t* at, std::size_t count, uint32_t value) {
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x)
    at[i] = value;
}

__global__ void count_wrong_words(const uint32_t* at, std::size_t count, uint32_t wanted,
                                  unsigned long long* wrong) {
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x)
    if (at[i] != wanted) atomicAdd(wrong, 1ull);
}

__global__ void delay() {
  for (const long long begin = clock64(); clock64() - begin < kDelayCycles;) {
  }
}

template <int kBytes>
struct Args {
  uint32_t* at;  // null
  uint64_t unused[kBytes / 8 - 1];
};
template <int kBytes>
__global__ void read_args(const __grid_constant__ Args<kBytes> args) {
  if (args.at != nullptr) *args.at = threadIdx.x;
}

class Bench {
 public:
  Bench() {
    cudaDeviceProp about;
    check(cudaGetDeviceProperties(&about, 0), "cudaGetDeviceProperties");
    sms_ = about.multiProcessorCount;
    l2_ = about.l2CacheSize;
    std::size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    // A third of the free memory for the tensors, and a third as the target of the copies.
    tensor_bytes_ = std::min<std::size_t>(std::size_t{2} << 30, free / 3);
    check(cudaMalloc(&memory_, tensor_bytes_), "cudaMalloc");
    check(cudaMalloc(&copy_target_, tensor_bytes_), "cudaMalloc");
    flush_bytes_ = std::min<std::size_t>(4 * l2_, tensor_bytes_);
    check(cudaMalloc(&wrong_, sizeof *wrong_), "cudaMalloc");
    check(cudaEventCreate(&begin_), "cudaEventCreate");
    check(cudaEventCreate(&end_), "cudaEventCreate");
    std::printf(
        "{\"question\": \"about\", \"gpu\": \"%s\", \"multiprocessors\": %d, \"l2\": %zu}\n",
        about.name, sms_, l2_);
  }

  // Prints the microseconds per launch until the call returns, and on the GPU.
  template <int kBytes>
  void run_args() {
    const Args<kBytes> args = {};
    std::vector<double> issued;
    const double us = median_us(false, [&] {
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < kLaunches; ++i) read_args<<<1, kThreads>>>(args);
      const std::chrono::duration<double, std::micro> took =
          std::chrono::steady_clock::now() - begin;
      issued.push_back(took.count() / kLaunches);
      check(cudaGetLastError(), "read_args");
    });
    std::nth_element(issued.begin(), issued.begin() + issued.size() / 2, issued.end());
    std::printf("{\"question\": \"args\", \"bytes\": %d, \"issue_us\": %.3f, \"us\": %.3f}\n",
                kBytes, issued[issued.size() / 2], us / kLaunches);
  }

  template <class T, int kSrcs>
  void run(const std::vector<std::size_t>& sizes, uint32_t (*word_of)(float)) {
    for (std::size_t bytes :
         {std::size_t{256} << 10, std::size_t{4} << 20, std::size_t{64} << 20}) {
      const double copied = copy_us(kSrcs * bytes, false);
      for (const Variant& variant : variants<T, kSrcs>())
        for (int waves : {1, 2, 4, 8, 16}) {
          const unsigned long long wrong = count_wrong(variant, waves, kSrcs, bytes, word_of);
          head<T>("variant", kSrcs, bytes, variant, waves);
          std::printf(", \"us\": %.3f, \"memcpy_us\": %.3f, \"wrong\": %llu}\n",
                      fold_us(variant, waves, kSrcs, bytes, false), copied, wrong);
        }
    }
    for (const Variant& variant : variants<T, kSrcs>()) {
      if (!is_library(variant, kWaves)) continue;
      for (std::size_t bytes : sizes) {
        if (kSrcs * bytes > tensor_bytes_) continue;
        head<T>("l2", kSrcs, bytes, variant, kWaves);
        std::printf(", \"hot_us\": %.3f, \"cold_us\": %.3f, \"memcpy_hot_us\": %.3f",
                    fold_us(variant, kWaves, kSrcs, bytes, false),
                    fold_us(variant, kWaves, kSrcs, bytes, true), copy_us(kSrcs * bytes, false));
        std::printf(", \"memcpy_cold_us\": %.3f}\n", copy_us(kSrcs * bytes, true));
      }
    }
  }

 private:
  static bool is_library(const Variant& v, int waves) {
    return v.width == kPacketBytes && v.in_flight == kInFlight && v.blocks_per_sm == kBlocksPerSm &&
           waves == kWaves;
  }

  template <class T>
  void head(const char* question, int world, std::size_t bytes, const Variant& v, int waves) {
    std::printf("{\"question\": \"%s\", \"dtype\": \"%s\", \"world\": %d, \"bytes\": %zu", question,
                T::kName, world, bytes);
    std::printf(", \"width\": %d, \"in_flight\": %d, \"blocks_per_sm\": %d, \"waves\": %d", v.width,
                v.in_flight, v.blocks_per_sm, waves);
    std::printf(", \"library\": %s", is_library(v, waves) ? "true" : "false");
  }

  Ranks ranks(int world, std::size_t bytes) const {
    Ranks made = {};
    for (int r = 0; r < world; ++r) made.at[r] = memory_ + r * bytes / sizeof(uint32_t);
    return made;
  }

  void launch(const Variant& v, int waves, int world, std::size_t bytes) {
    const std::size_t packets = bytes / v.width;
    const std::size_t wanted = (packets + kThreads - 1) / kThreads;
    const std::size_t most = std::size_t(sms_) * v.blocks_per_sm * waves;
    v.kernel<<<static_cast<unsigned>(std::min(wanted, most)), kThreads>>>(ranks(world, bytes),
                                                                          packets);
    check(cudaGetLastError(), "fold");
  }

  unsigned long long count_wrong(const Variant& v, int waves, int world, std::size_t bytes,
                                 uint32_t (*word_of)(float)) {
    const std::size_t count = bytes / sizeof(uint32_t);
    for (int r = 0; r < world; ++r)
      set_all<<<sms_, kThreads>>>(memory_ + r * count, count, word_of(r + 1.0f));
    launch(v, waves, world, bytes);
    check(cudaMemset(wrong_, 0, sizeof *wrong_), "cudaMemset");
    count_wrong_words<<<sms_, kThreads>>>(memory_, world * count, word_of((world + 1) / 2.0f),
                                          wrong_);
    unsigned long long wrong = 0;
    check(cudaMemcpy(&wrong, wrong_, sizeof wrong, cudaMemcpyDefault), "the check");
    return wrong;
  }

  // Returns the median microseconds of `run`. Each timed run follows an untimed one, or, if `cold`,
  // a memset that flushes L2.
  template <class Run>
  double median_us(bool cold, Run run) {
    std::vector<float> ms(kRepeats);
    for (float& elapsed : ms) {
      delay<<<1, 1>>>();
      if (cold)
        check(cudaMemsetAsync(copy_target_, 0, flush_bytes_), "cudaMemsetAsync");
      else
        run();
      check(cudaEventRecord(begin_), "cudaEventRecord");
      run();
      check(cudaEventRecord(end_), "cudaEventRecord");
      check(cudaEventSynchronize(end_), "cudaEventSynchronize");
      check(cudaEventElapsedTime(&elapsed, begin_, end_), "cudaEventElapsedTime");
    }
    std::nth_element(ms.begin(), ms.begin() + kRepeats / 2, ms.end());
    return ms[kRepeats / 2] * 1e3;
  }

  double fold_us(const Variant& v, int waves, int world, std::size_t bytes, bool cold) {
    return median_us(cold, [&] { launch(v, waves, world, bytes); });
  }
  double copy_us(std::size_t bytes, bool cold) {
    return median_us(cold, [&] {
      check(cudaMemcpyAsync(copy_target_, memory_, bytes, cudaMemcpyDeviceToDevice),
            "cudaMemcpyAsync");
    });
  }

  int sms_ = 0;
  std::size_t l2_ = 0, tensor_bytes_ = 0, flush_bytes_ = 0;
  uint32_t *memory_ = nullptr, *copy_target_ = nullptr;
  unsigned long long* wrong_ = nullptr;
  cudaEvent_t begin_, end_;
};

uint32_t float_word(float value) {
  uint32_t word;
  static_assert(sizeof word == sizeof value);
  __builtin_memcpy(&word, &value, sizeof word);
  return word;
}
uint32_t half_words(float value) {
  const uint32_t high = float_word(value) >> 16;  // exact for the small multiples of 0.5 used here
  return high << 16 | high;
}

}  // namespace

int main() {
  int count = 0;
  if (const cudaError_t found = cudaGetDeviceCount(&count); found != cudaSuccess || count == 0) {
    std::printf("there is no GPU to fold on here: %s\n", cudaGetErrorString(found));
    return kNoDevice;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // keeps the printed lines if killed midway
  try {
    Bench bench;
    bench.run_args<512>();   // one tensor of up to 56 ranks
    bench.run_args<4096>();  // the library's small and large arguments
    bench.run_args<32760>();
    std::vector<std::size_t> sizes;
    for (std::size_t bytes = 16 << 10; bytes <= std::size_t{256} << 20; bytes *= 4)
      sizes.push_back(bytes);
    bench.run<Float, 4>(sizes, float_word);
    bench.run<Half, 4>(sizes, half_words);
    bench.run<Float, 8>(sizes, float_word);
    bench.run<Half, 8>(sizes, half_words);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "reduce_kernels: %s\n", error.what());
    return 1;
  }
  return 0;
}
