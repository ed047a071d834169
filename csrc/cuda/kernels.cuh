// The fold kernels, and what all kernels use. One kernel launch runs all folds, or all copies, of a
// level on one stream, for all tensors of a call.
#pragma once
#include <cuda_runtime_api.h>

#include "kernels.h"
#include "tree_kernel.h"

namespace pycollect::cuda {

template <int kBytes>
using Word = std::conditional_t<
    kBytes == 1, uint8_t,
    std::conditional_t<kBytes == 2, uint16_t, std::conditional_t<kBytes == 4, uint32_t, uint64_t>>>;

// Accesses the device's memory, in program order. Every access is inline assembly: by itself nvcc
// 13.0 stores a packet in four parts (eight for bf16), and may load through the read-only cache,
// which a kernel's own stores do not update, although a dst may be a src. __host__ only because the
// callers are constexpr; the host never runs it.
struct GpuAccessor {
  template <class V>
  __host__ __device__ __forceinline__ static V load(uint64_t at) {
    if constexpr (std::is_same_v<V, Packet>) {
      Packet v;
      asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
                   : "l"(at));
      return v;
    } else {
      struct LoadedWords {
        Word<alignof(V)> of[sizeof(V) / alignof(V)];
      } v;
      each<sizeof(V) / alignof(V)>([&](auto i) { word(v.of[i], at + i * alignof(V)); });
      return std::bit_cast<V>(v);
    }
  }

  template <class V>
  __host__ __device__ __forceinline__ static void store(uint64_t at, V v) {
    if constexpr (std::is_same_v<V, Packet>) {
      asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.words[0]),
                   "r"(v.words[1]), "r"(v.words[2]), "r"(v.words[3]));
    } else {
      struct StoredWords {
        Word<alignof(V)> of[sizeof(V) / alignof(V)];
      };
      const auto words = std::bit_cast<StoredWords>(v);
      each<sizeof(V) / alignof(V)>([&](auto i) { set_word(at + i * alignof(V), words.of[i]); });
    }
  }

  // Calls body(0), ..., body(n - 1) in a loop that is not unrolled.
  template <class Body>
  __host__ __device__ __forceinline__ static void repeat(int n, Body body) {
#pragma unroll 1
    for (int i = 0; i < n; ++i) body(i);
  }

  __host__ __device__ __forceinline__ static float widened(uint16_t half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
  }
  __host__ __device__ __forceinline__ static uint16_t narrowed(float value) {
    uint16_t half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
  }

 private:
  template <class W>
  __host__ __device__ __forceinline__ static void word(W& v, uint64_t at) {
    if constexpr (sizeof(W) == 1) {
      uint32_t wide;  // inline assembly has no 8-bit operands
      asm volatile("ld.global.u8 %0, [%1];" : "=r"(wide) : "l"(at));
      v = static_cast<W>(wide);
    } else if constexpr (sizeof(W) == 2) {
      asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(at));
    } else if constexpr (sizeof(W) == 4) {
      asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(at));
    } else {
      asm volatile("ld.global.u64 %0, [%1];" : "=l"(v) : "l"(at));
    }
  }
  template <class W>
  __host__ __device__ __forceinline__ static void set_word(uint64_t at, W v) {
    if constexpr (sizeof(W) == 1)
      asm volatile("st.global.u8 [%0], %1;" ::"l"(at), "r"(static_cast<uint32_t>(v)));
    else if constexpr (sizeof(W) == 2)
      asm volatile("st.global.u16 [%0], %1;" ::"l"(at), "h"(v));
    else if constexpr (sizeof(W) == 4)
      asm volatile("st.global.u32 [%0], %1;" ::"l"(at), "r"(v));
    else
      asm volatile("st.global.u64 [%0], %1;" ::"l"(at), "l"(v));
  }
};

template <class T, class Op>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    fold_level(const __grid_constant__ KernelArgs args) {
  run_folds<T, Op>(args.head, args.words, {blockIdx.x, gridDim.x, threadIdx.x}, GpuAccessor());
}

template <class T, class Op>
const void* fold_kernel() {
  return reinterpret_cast<const void*>(&fold_level<T, Op>);
}

template <class T, class Op, class Out>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    tree_level(const __grid_constant__ KernelArgs args) {
  run_tree_folds<T, Op, Out>(args.head, args.words, {blockIdx.x, gridDim.x, threadIdx.x},
                             GpuAccessor());
}

template <class T, class Op, class Out>
const void* tree_kernel() {
  return reinterpret_cast<const void*>(&tree_level<T, Op, Out>);
}

template <class T, class... Op>
FoldKernels fold_kernels_of(TypeList<Op...>) {
  const auto kernel = [](auto* op) -> const void* {
    using Operation = std::remove_pointer_t<decltype(op)>;
    if constexpr (is_kernel_type<T, Operation>) return fold_kernel<T, Operation>();
    return nullptr;
  };
  const auto in_tree_order = [](auto* op) -> const void* {
    using Operation = std::remove_pointer_t<decltype(op)>;
    if constexpr (is_kernel_type<T, Operation> && order_matters_on<T, Operation>)
      return tree_kernel<T, Operation, T>();
    return nullptr;
  };
  FoldKernels all{{kernel(static_cast<Op*>(nullptr))...},
                  {in_tree_order(static_cast<Op*>(nullptr))...}};
  if constexpr (is_narrow<T>) all.widening_sum = tree_kernel<T, Avg, float>();
  return all;
}
template <class T>
FoldKernels fold_kernels() {
  return fold_kernels_of<T>(ReduceOps{});
}

}  // namespace pycollect::cuda
