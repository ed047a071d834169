// The reduction kernel, a fold, with its constants as template parameters, and the variants to
// measure.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <vector>

#include "../../../csrc/cuda/thread_work.h"

namespace folds {

using pycollect::cuda::each;
using pycollect::cuda::kThreads;

inline constexpr int kMaxRanks = 8;

struct Ranks {
  uint32_t* at[kMaxRanks];
};

template <int kWords>
struct Words {
  uint32_t of[kWords];
};

// `load` and `store` use inline assembly, as in the library: otherwise nvcc splits a packet.
template <int kWords>
__device__ __forceinline__ Words<kWords> load(const uint32_t* at) {
  Words<kWords> v;
  if constexpr (kWords == 4)
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.of[0]), "=r"(v.of[1]), "=r"(v.of[2]), "=r"(v.of[3])
                 : "l"(at));
  else if constexpr (kWords == 2)
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.of[0]), "=r"(v.of[1]) : "l"(at));
  else
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v.of[0]) : "l"(at));
  return v;
}

template <int kWords>
__device__ __forceinline__ void store(uint32_t* at, const Words<kWords>& v) {
  if constexpr (kWords == 4)
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.of[0]), "r"(v.of[1]),
                 "r"(v.of[2]), "r"(v.of[3]));
  else if constexpr (kWords == 2)
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(v.of[0]), "r"(v.of[1]));
  else
    asm volatile("st.global.u32 [%0], %1;" ::"l"(at), "r"(v.of[0]));
}

struct Float {
  static constexpr const char* kName = "float32";
  static __device__ float2 widen(uint32_t word) { return {__uint_as_float(word), 0}; }
  static __device__ uint32_t narrow(float2 sum) { return __float_as_uint(sum.x); }
};
struct Half {
  static constexpr const char* kName = "bfloat16";
  static __device__ float2 widen(uint32_t word) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
  }
  static __device__ uint32_t narrow(float2 sum) {
    const __nv_bfloat162 pair = __float22bfloat162_rn(sum);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
};

template <class T, int kWords, int kSrcs, int kPackets>
__device__ __forceinline__ void fold(const Ranks& ranks, std::size_t packet, std::size_t step) {
  Words<kWords> v[kPackets * kSrcs];
  each<kPackets>([&](auto p) {
    each<kSrcs>([&](auto s) {
      v[p * kSrcs + s] = load<kWords>(ranks.at[s] + (packet + p * step) * kWords);
    });
  });
  each<kPackets>([&](auto p) {
    Words<kWords> result;
    each<kWords>([&](auto w) {
      float2 sum = T::widen(v[p * kSrcs].of[w]);
      each<kSrcs - 1>([&](auto s) {
        const float2 next = T::widen(v[p * kSrcs + s + 1].of[w]);
        sum = {sum.x + next.x, sum.y + next.y};
      });
      result.of[w] = T::narrow({sum.x * (1.0f / kSrcs), sum.y * (1.0f / kSrcs)});
    });
    each<kSrcs>([&](auto d) { store<kWords>(ranks.at[d] + (packet + p * step) * kWords, result); });
  });
}

template <class T, int kWords, int kSrcs, int kLoads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    fold_all(const __grid_constant__ Ranks ranks, std::size_t packets) {
  constexpr int kPackets = kLoads > kSrcs ? kLoads / kSrcs : 1;
  const std::size_t step = std::size_t{gridDim.x} * kThreads;
  std::size_t packet = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  for (; packet + (kPackets - 1) * step < packets; packet += kPackets * step)
    fold<T, kWords, kSrcs, kPackets>(ranks, packet, step);
  for (; packet < packets; packet += step) fold<T, kWords, kSrcs, 1>(ranks, packet, step);
}

using Kernel = void (*)(Ranks, std::size_t);
struct Variant {
  int width, in_flight, blocks_per_sm;
  Kernel kernel;
};

template <class T, int kSrcs>
std::vector<Variant> variants() {
  return {
      {4, 8, 3, fold_all<T, 1, kSrcs, 8, 3>},    {8, 8, 3, fold_all<T, 2, kSrcs, 8, 3>},
      {16, 4, 2, fold_all<T, 4, kSrcs, 4, 2>},   {16, 4, 3, fold_all<T, 4, kSrcs, 4, 3>},
      {16, 4, 4, fold_all<T, 4, kSrcs, 4, 4>},   {16, 8, 2, fold_all<T, 4, kSrcs, 8, 2>},
      {16, 8, 3, fold_all<T, 4, kSrcs, 8, 3>},   {16, 8, 4, fold_all<T, 4, kSrcs, 8, 4>},
      {16, 16, 1, fold_all<T, 4, kSrcs, 16, 1>}, {16, 16, 2, fold_all<T, 4, kSrcs, 16, 2>},
      {16, 16, 3, fold_all<T, 4, kSrcs, 16, 3>}, {16, 32, 1, fold_all<T, 4, kSrcs, 32, 1>},
  };
}

}  // namespace folds
