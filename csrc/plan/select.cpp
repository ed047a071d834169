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

struct Default {
  const char* name;
  const char* reason;
};

// Below this a second hop costs more than the bytes it would spread over more links.
constexpr std::size_t kOneHopBytes = 256 * 1024;

// Up to here, of what all others have, everybody reads everything: one exchange between processes.
// Above, everybody adds up a share and fetches the others', which costs a second exchange and reads
// less. An exchange of two ranks, who have a core each nearly everywhere, takes 0.15 us; of more
// than the machine has cores, it takes a turn of each.
constexpr std::size_t kOneExchangeBytes = 24 * 1024;
constexpr std::size_t kOneExchangeBytesOfTwo = 2 * 1024;

Default all_reduce_of_processes(const Situation& s) {
  if (s.ground == Ground::arenas)
    return {"fused", "every process reduces a share for all, in place"};
  const std::size_t most = s.world == 2 ? kOneExchangeBytesOfTwo : kOneExchangeBytes;
  if (s.bytes * std::max(s.world - 1, 1) <= most) return {"one_shot", "small: one exchange"};
  // Pulling the results was 1.1 to 1.6 times as fast as the pushing of `fused`, at every size.
  return {"two_shot", "every process reduces a share and fetches the others'"};
}

Default all_reduce_on_gpus(const Situation& s) {
  return s.bytes <= kOneHopBytes ? Default{"leader", "small: one launch and one join"}
                                 : Default{"fused", "every device reduces a share for all"};
}

Default all_reduce_of_slabs(const Situation& s) {
  // A hand-over between streams costs more than a launch, and one kernel has the whole GPU.
  if (s.ground == Ground::slabs || s.bytes <= kOneHopBytes)
    return {"leader", "one launch over all slots, and two hand-overs"};
  return {"two_shot", "every GPU reduces a share and fetches the others'"};
}

Default all_reduce_of_tracts(const Situation& s) {
  if (s.ground == Ground::tracts || s.bytes <= kOneHopBytes)
    return {"leader", "one launch over all tensors, and two hand-overs"};
  return {"fused", "every GPU reduces a share for all, in place"};
}

Default all_reduce_on(const Situation& s) {
  if (s.ground == Ground::shared)
    // Whoever runs a step can read and write everywhere, so one step over all ranks moves the
    // fewest bytes and is split by elements.
    return {"leader", "all ranks share one memory"};
  if (s.ground == Ground::peers) return all_reduce_on_gpus(s);
  if (s.ground == Ground::slabs || s.ground == Ground::slabs_apart) return all_reduce_of_slabs(s);
  if (s.ground == Ground::tracts || s.ground == Ground::tracts_apart)
    return all_reduce_of_tracts(s);
  if (s.ground == Ground::slots || s.ground == Ground::arenas) return all_reduce_of_processes(s);
  if (accumulates_in_itself(s.dtype))
    return {"ring", "staged through the host, one neighbour each"};
  return {"two_shot", "staged through the host, and a ring would round at every hop"};
}

Default unasked(const Situation& s) {
  if (s.collective == Collective::all_reduce) return all_reduce_on(s);
  if (s.collective == Collective::barrier) return {"barrier", "there is one"};
  return {"direct", "one hop"};
}

}  // namespace

Choice choose(const Situation& s, std::string_view named, bool explain) {
  const Default by_itself = unasked(s);
  const Algorithm& algorithm = find(s.collective, named.empty() ? by_itself.name : named);
  require(algorithm.in_place || !s.in_place, name(s.collective), ": algorithm '", algorithm.name,
          "' cannot run in place; give it an output of its own");
  Choice choice{&algorithm, pieces_for(s.bytes), {}};
  if (!explain) return choice;
  const bool canonical = algorithm.canonical(s.dtype);
  choice.reason = named.empty() ? by_itself.reason
                  : canonical ? "asked for by name"
                              : "asked for by name; not the left fold in rank order for this dtype";
  return choice;
}

}  // namespace pycollect
