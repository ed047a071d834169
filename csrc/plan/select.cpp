#include "select.h"

#include <algorithm>

#include "error.h"

namespace pycollect {
namespace {

// Pipeline pieces of this size hide the wait between two hops and still fit into a core's L2 cache.
constexpr std::size_t kPieceBytes = 256 * 1024;
constexpr std::size_t kMostPieces = 16;

int pieces_for(const SelectionKey& s) {
  return static_cast<int>(std::clamp<std::size_t>(s.bytes / kPieceBytes, 1, kMostPieces));
}

struct Default {
  const char* name;
  const char* reason;
};

// Up to this size a second hop costs more than it saves by using more links.
constexpr std::size_t kOneHopBytes = 256 * 1024;

// Limits on the bytes that all other ranks contribute. Up to them every process reads all inputs,
// in one exchange between processes. Above them, every process reduces a share and fetches the
// other shares, which costs a second exchange but reads less. An exchange of two ranks takes 0.15
// us, as they have a core each nearly everywhere. With more ranks than cores, an exchange takes a
// scheduler turn of each rank.
constexpr std::size_t kOneExchangeBytes = 24 * 1024;
constexpr std::size_t kOneExchangeBytesOfTwo = 2 * 1024;

Default all_reduce_of_processes(const SelectionKey& s) {
  if (s.topology == Topology::shm_symmetric)
    return {"fused", "every process reduces a share for all, in place"};
  const std::size_t most = s.world == 2 ? kOneExchangeBytesOfTwo : kOneExchangeBytes;
  if (s.bytes * std::max(s.world - 1, 1) <= most) return {"one_shot", "small: one exchange"};
  // Pulled results were 1.1 to 1.6 times as fast as the pushed ones of `fused`, at every size.
  return {"two_shot", "every process reduces a share and fetches the others'"};
}

Default all_reduce_on_gpus(const SelectionKey& s) {
  return s.bytes <= kOneHopBytes ? Default{"leader", "small: one launch and one join"}
                                 : Default{"fused", "every device reduces a share for all"};
}

Default all_reduce_on(const SelectionKey& s) {
  if (s.topology == Topology::shared)
    // Any thread can read and write all ranks' memory, so one step over all ranks moves the fewest
    // bytes and is split by elements.
    return {"leader", "all ranks share one memory"};
  if (s.topology == Topology::peers) return all_reduce_on_gpus(s);
  if (s.topology == Topology::shm_buffers || s.topology == Topology::shm_symmetric)
    return all_reduce_of_processes(s);
  if (accumulates_in_itself(s.dtype) && s.order == FoldOrder::rank)
    return {"chain", "staged through the host, one neighbour each"};
  return {"two_shot", "staged through the host, and a chain would round or reorder"};
}

Default default_of(const SelectionKey& s) {
  if (s.collective == Collective::all_reduce) return all_reduce_on(s);
  if (s.collective == Collective::barrier) return {"barrier", "the only barrier algorithm"};
  return {"direct", "one hop"};
}

[[noreturn]] void refuse_in_tree_order(const Algorithm& refused) {
  std::string names;
  for (const Algorithm* a : algorithms(refused.collective))
    if (a->order == Order::exact) names += text(names.empty() ? "'" : ", '", a->name, "'");
  throw std::invalid_argument(text(name(refused.collective), ": algorithm '", refused.name,
                                   "' adds in several steps, which ",
                                   "order='tree' excludes; use algorithm=None or one of ", names));
}

}  // namespace

Choice choose(const SelectionKey& s, std::string_view named, bool explain) {
  const Default by_default = default_of(s);
  const Algorithm& algorithm = find(s.collective, named.empty() ? by_default.name : named);
  require(algorithm.in_place || !s.in_place, name(s.collective), ": algorithm '", algorithm.name,
          "' cannot run in place; give it an output of its own");
  if (s.order == FoldOrder::tree && algorithm.order != Order::exact) [[unlikely]]
    refuse_in_tree_order(algorithm);
  Choice choice{&algorithm, pieces_for(s), {}};
  if (!explain) return choice;
  const bool keeps_contract = algorithm.keeps_contract(s.dtype);
  choice.reason = named.empty() ? by_default.reason
                  : keeps_contract
                      ? "asked for by name"
                      : "asked for by name; not the left fold in rank order for this dtype";
  return choice;
}

}  // namespace pycollect
