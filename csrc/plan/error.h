// Errors of the core: exceptions whose messages state what was asked, what is allowed and what to
// do, and the functions that throw them. No macros; csrc/torch converts them to ValueError,
// TypeError and RuntimeError.
#pragma once
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>

namespace pycollect {

// An unsupported dtype or op: becomes TypeError in Python.
struct TypeError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// A failure while a collective runs: becomes pycollect.CollectiveError and its subclasses.
struct CollectiveError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct PeerLost : CollectiveError {
  using CollectiveError::CollectiveError;
};
struct Timeout : CollectiveError {
  using CollectiveError::CollectiveError;
};
struct Deadlock : CollectiveError {
  using CollectiveError::CollectiveError;
};

// Throw for a mistake of the caller; becomes ValueError in Python. Where the parts take long to
// compute, `reject` after an `if` computes them only for the message.
template <class... Parts>
[[noreturn]] void reject(const Parts&... why) {
  throw std::invalid_argument(text(why...));
}
template <class... Parts>
void require(bool ok, const Parts&... why) {
  if (!ok) [[unlikely]]
    reject(why...);
}

// Throws for a mistake of the caller about a type; becomes TypeError in Python.
template <class... Parts>
void require_type(bool ok, const Parts&... why) {
  if (!ok) [[unlikely]]
    throw TypeError(text(why...));
}

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
