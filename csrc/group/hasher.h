// Hash of 64-bit words for fingerprints that ranks compare. Not cryptographic.
#pragma once
#include <cstdint>

namespace pycollect::ipc {

class Hasher {
 public:
  // Multiplies, and combines the halves of the product: takes a few cycles, and every bit of a word
  // affects all bits of the hash.
  void add(uint64_t word) {
    const auto wide = static_cast<unsigned __int128>(state_ ^ word) * 0x9e3779b97f4a7c15U;
    state_ = static_cast<uint64_t>(wide) ^ static_cast<uint64_t>(wide >> 64) ^ 0x2545f4914f6cdd1dU;
  }
  uint64_t value() const { return state_; }

 private:
  uint64_t state_ = 0x6a09e667f3bcc909U;
};

}  // namespace pycollect::ipc
