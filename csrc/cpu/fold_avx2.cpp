// The fold kernels in 32-byte vectors, for processors with AVX2 and F16C.
#include <cstddef>
#include <cstdint>
#include <type_traits>

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#include "../plan/reductions.h"
#pragma GCC pop_options
#endif
#include "fold.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,f16c")

namespace pycollect::cpu {
namespace {

constexpr int kVectorBytes = 32;
#include "fold_elements.h"

template <>
struct Element<Half> {
  using Acc = Vector<float>;
  static constexpr int kParts = 2;
  static constexpr bool kSlow = false, kConsecutive = true;
  explicit Element(const FoldOptions&) {}
  [[gnu::always_inline]] void decode(Raw raw, Acc (&to)[2]) const {
    const __m256i halves = as<__m256i>(raw);
    to[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    to[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
  }
  [[gnu::always_inline]] Raw encode(const Acc (&from)[2]) const {
    const __m256i low = _mm256_castsi128_si256(_mm256_cvtps_ph(from[0], _MM_FROUND_TO_NEAREST_INT));
    return as<Raw>(
        _mm256_inserti128_si256(low, _mm256_cvtps_ph(from[1], _MM_FROUND_TO_NEAREST_INT), 1));
  }
};

[[gnu::always_inline]] inline void store_non_temporal(std::byte* to, Raw v) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), as<__m256i>(v));
}
[[gnu::always_inline]] inline void fence_non_temporal() { _mm_sfence(); }

#include "fold_kernel.h"

}  // namespace

const FoldTable* avx2_folds() { return &kFolds; }

}  // namespace pycollect::cpu
#pragma GCC pop_options

#else

const pycollect::cpu::FoldTable* pycollect::cpu::avx2_folds() { return nullptr; }

#endif
