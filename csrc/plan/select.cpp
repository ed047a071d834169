#include "select.h"

#include <algorithm>

#include "error.h"

namespace pycollect {
namespace {

// A piece this large hides the hand-over between two hops of a pipeline and still fits a core's L2.
constexpr std::size_t kPieceBytes = 256 * 1024;
constexpr std::size_t kMostPieces = 16;

int pieces_for(std::size_t bytes) {
  return static_cast<int>(std::clamp<std::size_t>(bytes / kPieceBytes, 1, kMostPieces));
}

// All ranks share one memory: whoever runs a step can read and write everywhere, so one step over
// all ranks moves the fewest bytes and is split by elements.
const char* one_memory(Collective collective) {
  switch (collective) {
    case Collective::all_reduce:
      return "leader";
    case Collective::barrier:
      return "barrier";
    default:
      return "direct";
  }
}

}  // namespace

Choice choose(const Situation& s, std::string_view named, bool explain) {
  const Algorithm& algorithm = find(s.collective, named.empty() ? one_memory(s.collective) : named);
  require(algorithm.in_place || !s.in_place, name(s.collective), ": algorithm '", algorithm.name,
          "' cannot run in place; give it an output of its own");
  Choice choice{&algorithm, pieces_for(s.bytes), {}};
  if (!explain) return choice;
  const bool canonical = algorithm.canonical(s.dtype);
  choice.reason = named.empty() ? "all ranks share one memory"
                  : canonical ? "asked for by name"
                              : "asked for by name; not the left fold in rank order for this dtype";
  return choice;
}

}  // namespace pycollect
