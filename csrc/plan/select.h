// The one place where an algorithm is chosen, and why. Only canonical algorithms are ever chosen
// unasked, so the choice changes the speed and never the bits.
#pragma once
#include <cstddef>
#include <string>

#include "registry.h"

namespace pycollect {

// How the ranks reach each other's memory.
enum class Ground : uint8_t {
  shared,        // one memory
  peers,         // several, which everybody may read and write
  staged,        // several, some only through the host
  slots,         // of processes: private, but for small slots that all of them share
  arenas,        // of processes: the tensors themselves lie in memory that all of them share
  slabs,         // of processes on one GPU: private, but for slots in its memory
  slabs_apart,   // of processes on several GPUs, which reach each other's slots
  tracts,        // of processes on one GPU: the tensors themselves lie where all of them reach
  tracts_apart,  // the same on several GPUs
};
inline constexpr std::size_t kGrounds = 9;

// Does everybody reach everybody's tensors, where processes have memory of their own?
constexpr bool is_open(Ground g) {
  return g == Ground::arenas || g == Ground::tracts || g == Ground::tracts_apart;
}

// What is known when a call arrives.
struct Situation {
  Collective collective;
  int world;
  std::size_t bytes;  // of one rank's largest buffer, all tensors of the call together
  DType dtype;
  bool in_place;
  Ground ground = Ground::shared;
  bool operator==(const Situation&) const = default;
};

struct Choice {
  const Algorithm* algorithm;
  int pieces;          // of a pipeline
  std::string reason;  // for people; built only when asked for
};

// `named` is empty when nobody asked for one. Throws ValueError for a name that does not exist or
// that cannot run in place when it would have to.
Choice choose(const Situation& situation, std::string_view named, bool explain = false);

}  // namespace pycollect
