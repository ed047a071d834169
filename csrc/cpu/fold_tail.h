// Loads and stores part of a vector, for instruction sets without masks. Included inside the
// namespace of an instruction set (see fold_vectors.h).
#pragma once
#include "fold_vectors.h"

struct Tail {
  std::size_t bytes;
  explicit Tail(std::size_t n) : bytes(n) {}
  [[gnu::always_inline]] Raw load(const std::byte* from) const {
    Raw v = {};
    if (bytes == kVectorBytes) return WholeVector::load(from);
    __builtin_memcpy(&v, from, bytes);
    return v;
  }
  [[gnu::always_inline]] void store(std::byte* to, Raw v) const {
    if (bytes == kVectorBytes) return WholeVector::store(to, v);
    __builtin_memcpy(to, &v, bytes);
  }
};
