// Vectors of kVectorBytes bytes, and their loads and stores. fold_<isa>.cpp includes this inside a
// namespace of its own, with the compiler set to that instruction set. So this includes nothing of
// std: the linker could keep a function compiled here as the only copy for the whole program.
#pragma once

template <class T>
struct VectorOf {
  typedef T type [[gnu::vector_size(kVectorBytes)]];
};
template <class T>
using Vector = typename VectorOf<T>::type;
using Raw = Vector<uint8_t>;

// A cast between vectors of one width keeps the bits.
template <class To, class From>
[[gnu::always_inline]] inline To as(From v) {
  return (To)v;
}

struct WholeVector {
  [[gnu::always_inline]] static Raw load(const std::byte* from) {
    Raw v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
  }
  [[gnu::always_inline]] static void store(std::byte* to, Raw v) {
    __builtin_memcpy(to, &v, sizeof v);
  }
};
