// Conversions of whole rows between narrow floats and their accumulators, in the order of the
// elements. Included inside the namespace of an instruction set (see fold_vectors.h).
#pragma once
#include "fold_elements.h"

// The accumulators of one vector of elements, as `decode` returns them, and as floats.
template <class T>
union Accumulators {
  using Part = typename Element<T>::Acc;
  static constexpr int kParts = Element<T>::kParts, kLanes = kVectorBytes / 4;
  Part parts[kParts];
  float values[kParts][kLanes];
  // Returns the accumulator of an element.
  [[gnu::always_inline]] float& at(int element) {
    if constexpr (Element<T>::kConsecutive)
      return values[element / kLanes][element % kLanes];
    else
      return values[element % kParts][element / kParts];
  }
};

template <class T>
void widen(float* to, const std::byte* from, std::size_t count, const FoldOptions& options) {
  constexpr std::size_t kElements = kVectorBytes / sizeof(T);
  const Element<T> element(options);
  for (std::size_t done = 0; done < count; done += kElements) {
    const std::size_t n = count - done < kElements ? count - done : kElements;
    Raw raw = {};
    Accumulators<T> all;
    if (n == kElements) {
      __builtin_memcpy(&raw, from + done * sizeof(T), sizeof raw);
      element.decode(raw, all.parts);
      for (std::size_t i = 0; i < kElements; ++i) to[done + i] = all.at(i);
    } else {
      __builtin_memcpy(&raw, from + done * sizeof(T), n * sizeof(T));
      element.decode(raw, all.parts);
      for (std::size_t i = 0; i < n; ++i) to[done + i] = all.at(i);
    }
  }
}

template <class T>
void narrow(std::byte* to, const float* from, std::size_t count, const FoldOptions& options) {
  constexpr std::size_t kElements = kVectorBytes / sizeof(T);
  const Element<T> element(options);
  for (std::size_t done = 0; done < count; done += kElements) {
    const std::size_t n = count - done < kElements ? count - done : kElements;
    Accumulators<T> all{};
    if (n == kElements)
      for (std::size_t i = 0; i < kElements; ++i) all.at(i) = from[done + i];
    else
      for (std::size_t i = 0; i < n; ++i) all.at(i) = from[done + i];
    const Raw raw = element.encode(all.parts);
    __builtin_memcpy(to + done * sizeof(T), &raw, n * sizeof(T));
  }
}

template <class T>
constexpr Conversions conversions_of() {
  if constexpr (is_narrow<T>)
    return {&widen<T>, &narrow<T>};
  else
    return {nullptr, nullptr};
}
