// Looks up a name among the allowed ones.
#pragma once
#include <span>
#include <stdexcept>
#include <string>

#include "error.h"

namespace pycollect {

// Returns the index of `word` in `names`. Throws std::invalid_argument that lists the names.
inline std::size_t find_name(const char* what, const std::string& word,
                             std::span<const char* const> names) {
  std::string allowed;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (word == names[i]) return i;
    allowed += text(i == 0 ? "" : ", ", names[i]);
  }
  throw std::invalid_argument(text(what, " is '", word, "'; allowed are ", allowed));
}

}  // namespace pycollect
