// The fold kernels in 16-byte vectors, which every 64-bit processor has.
#include <cstddef>
#include <cstdint>
#include <type_traits>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "fold.h"

namespace pycollect::cpu {
namespace {

constexpr int kVectorBytes = 16;
#include "fold_elements.h"

template <>
struct Element<Half> : AnyHalf {
  explicit Element(const FoldOptions&) : AnyHalf({0x7c00, 0x7c00, 0x7e00}) {}
};

#if defined(__x86_64__)
inline void store_non_temporal(std::byte* to, Raw v) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), as<__m128i>(v));
}
inline void fence_non_temporal() { _mm_sfence(); }
#else
inline void store_non_temporal(std::byte* to, Raw v) { WholeVector::store(to, v); }
inline void fence_non_temporal() {}
#endif

#include "fold_kernel.h"

}  // namespace

const FoldTable* portable_folds() { return &kFolds; }

}  // namespace pycollect::cpu
