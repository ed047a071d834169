// Selects the algorithm of a call, and explains the choice. Unless the caller names an algorithm,
// only algorithms that keep the numerical contract are chosen, so the choice changes the speed and
// never the bits.
#pragma once
#include <cstddef>
#include <string>

#include "registry.h"

namespace pycollect {

// Topology: how the ranks reach each other's memory.
enum class Topology : uint8_t {
  shared,         // one process, one memory
  peers,          // one process, several memories that every rank reads and writes
  staged,         // one process, several memories, some reached only through the host
  shm_buffers,    // processes with private tensors and small shared staging buffers on the host
  shm_symmetric,  // processes whose tensors lie in shared memory (symmetric heap)
};

// Selection key: the properties of a call that determine its algorithm.
struct SelectionKey {
  Collective collective;
  int world;
  std::size_t bytes;  // of one rank's largest buffer, over all tensors of the call
  DType dtype;
  bool in_place;
  Topology topology = Topology::shared;
  FoldOrder order = FoldOrder::rank;
  bool operator==(const SelectionKey&) const = default;
};

struct Choice {
  const Algorithm* algorithm;
  int pieces;          // number of pieces of a pipeline
  std::string reason;  // for display; empty unless `explain` is set
};

// `named`: the algorithm that the caller wants, or empty. Throws ValueError for an unknown name,
// for an algorithm that cannot run in place in a call that is in place, and in tree order for one
// that adds the ranks' data in several steps.
Choice choose(const SelectionKey& call, std::string_view named, bool explain = false);

}  // namespace pycollect
