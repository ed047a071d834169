#include "pieces.h"

#include "../plan/error.h"

namespace pycollect::shm {

std::size_t region_bytes(std::size_t slot_bytes, const Script& script) {
  const auto n = static_cast<std::size_t>(std::max(script.regions, 1));
  if (n == 1 && slot_bytes >= kLine) return slot_bytes / kLine * kLine;
  require(slot_bytes / n >= kLine, "slots of ", slot_bytes, " bytes are too small for ", n,
          " chunks; a group of so many ranks needs slots of at least ", n * kLine, " bytes");
  return slot_bytes / n / kLine * kLine;
}

}  // namespace pycollect::shm
