// The fold kernels in 64-byte vectors, for processors with AVX-512 F, BW, VL and DQ.
#include <cstddef>
#include <cstdint>
#include <type_traits>

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
#include "../plan/reductions.h"
#pragma GCC pop_options
#endif
#include "fold.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")

namespace pycollect::cpu {
namespace {

constexpr int kVectorBytes = 64;
#include "fold_elements.h"

template <>
struct Element<Half> {
  using Acc = Vector<float>;
  static constexpr int kParts = 2;
  static constexpr bool kSlow = false, kConsecutive = true;
  explicit Element(const FoldOptions&) {}
  // Masks of all lanes and shuffles instead of the plain intrinsics, whose undefined operands make
  // GCC 12 warn.
  static constexpr __mmask8 kHalf = 0xf, kWhole = 0xff;  // of eight 64-bit words
  static constexpr __mmask16 kAll = 0xffff;
  [[gnu::always_inline]] void decode(Raw raw, Acc (&to)[2]) const {
    const auto words = as<__m512i>(raw);
    to[0] = _mm512_maskz_cvtph_ps(kAll, _mm512_maskz_extracti64x4_epi64(kHalf, words, 0));
    to[1] = _mm512_maskz_cvtph_ps(kAll, _mm512_maskz_extracti64x4_epi64(kHalf, words, 1));
  }
  [[gnu::always_inline]] Raw encode(const Acc (&from)[2]) const {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m256i low = _mm512_maskz_cvtps_ph(kAll, from[0], kNearest);
    const __m256i high = _mm512_maskz_cvtps_ph(kAll, from[1], kNearest);
    const __m512i half = _mm512_maskz_inserti64x4(kWhole, _mm512_setzero_si512(), low, 0);
    return as<Raw>(_mm512_maskz_inserti64x4(kWhole, half, high, 1));
  }
};

template <>
struct PartOfVector<kVectorBytes> {
  __mmask64 lanes;
  [[gnu::always_inline]] explicit PartOfVector(std::size_t bytes)
      : lanes(~uint64_t{} >> (kVectorBytes - bytes)) {}
  [[gnu::always_inline]] Raw load(const std::byte* from) const {
    return as<Raw>(_mm512_maskz_loadu_epi8(lanes, from));
  }
  [[gnu::always_inline]] void store(std::byte* to, Raw v) const {
    _mm512_mask_storeu_epi8(to, lanes, as<__m512i>(v));
  }
};

[[gnu::always_inline]] inline void store_non_temporal(std::byte* to, Raw v) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), as<__m512i>(v));
}
[[gnu::always_inline]] inline void fence_non_temporal() { _mm_sfence(); }

#include "fold_kernel.h"

}  // namespace

const FoldTable* avx512_folds() { return &kFolds; }

}  // namespace pycollect::cpu
#pragma GCC pop_options

#else

const pycollect::cpu::FoldTable* pycollect::cpu::avx512_folds() { return nullptr; }

#endif
