// Where a call's tensors are, for those who reach them there: looked for in the same way whatever
// memory that is.
#pragma once
#include <optional>

#include "layout.h"
#include "script.h"
#include "sides.h"

namespace pycollect::shm {

// Of the sides that others are to touch, if each lies there whole. `place_of(at, bytes)` has the
// place of memory that others reach, or nothing; null: the call is not for that.
template <class PlaceOf>
std::optional<Places> find_places(const Script* open, const Sides& sides, const PlaceOf& place_of) {
  if (open == nullptr) return {};
  Places places;
  const auto find = [&](Where where, bool lent, uint64_t& at) {
    if (!lent) return true;
    const Memories& m = sides.memory(where);
    if (!m.whole() || m.base() == nullptr) return false;
    const std::optional<uint64_t> found = place_of(m.base(), sides.bytes(where));
    at = found.value_or(0);
    return found.has_value();
  };
  if (!find(Where::input, open->lends_input, places.input) ||
      !find(Where::output, open->lends_output, places.output))
    return {};
  return places;
}

}  // namespace pycollect::shm
