// The end of a vector that memory has only part of, for instruction sets without masks. Included
// inside the namespace of an instruction set, as fold_vectors.h says.
#pragma once
#include "fold_vectors.h"

struct Part {
  std::size_t bytes;
  explicit Part(std::size_t n) : bytes(n) {}
  [[gnu::always_inline]] Raw load(const std::byte* from) const {
    Raw v = {};
    if (bytes == kVectorBytes) return Whole::load(from);
    __builtin_memcpy(&v, from, bytes);
    return v;
  }
  [[gnu::always_inline]] void store(std::byte* to, Raw v) const {
    if (bytes == kVectorBytes) return Whole::store(to, v);
    __builtin_memcpy(to, &v, bytes);
  }
};
