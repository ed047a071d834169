// What a rank that ends a group grants the others, to let go of its memory before it is freed.
#pragma once
#include <thread>

#include "../shm/wait.h"

namespace pycollect::slabs {

// How long ranks that destroy a group wait for those that are slower: much more than it takes ranks
// that do so together, and nobody minds it in one that does so alone.
inline constexpr std::chrono::milliseconds kFarewell{2000};
inline constexpr std::chrono::milliseconds kGlance{1};

// Whether it came to that in time.
template <class Done>
bool farewell(const Done& done) {
  const auto end = shm::Clock::now() + kFarewell;
  while (!done() && shm::Clock::now() < end) std::this_thread::sleep_for(kGlance);
  return done();
}

}  // namespace pycollect::slabs
