// Loads and stores of the first bytes of a vector, for instruction sets without masks. Included
// inside the namespace of an instruction set (see fold_vectors.h).
#pragma once
#include "fold_vectors.h"

inline std::size_t part_of_vector(std::size_t bytes) { return bytes; }
[[gnu::always_inline]] inline Raw load_part(const std::byte* from, std::size_t bytes) {
  Raw v = {};
  if (bytes == kVectorBytes) return WholeVector::load(from);
  __builtin_memcpy(&v, from, bytes);
  return v;
}
[[gnu::always_inline]] inline void store_part(std::byte* to, Raw v, std::size_t bytes) {
  if (bytes == kVectorBytes) return WholeVector::store(to, v);
  __builtin_memcpy(to, &v, bytes);
}
