#include "select.h"

#include <algorithm>

#include "error.h"

namespace pycollect {
namespace {

// Pipeline pieces of this size hide the wait between two hops and still fit into a core's L2 cache.
constexpr std::size_t kPieceBytes = 256 * 1024;
constexpr std::size_t kMostPieces = 16;

// Between hosts a piece of a rail is a message: it must be so large that the work for a message is
// little beside the time that its bytes take. A pipeline over more hosts needs more of them.
constexpr std::size_t kHostPieceBytes = 128 * 1024;
constexpr int kMostPiecesPerHost = 8;

int pieces_for(const SelectionKey& s) {
  const bool one_host = s.hosts == nullptr;
  const std::size_t bytes = one_host ? s.bytes : std::min(s.bytes, s.run_bytes);
  const std::size_t least = one_host ? kPieceBytes : kHostPieceBytes * s.hosts->rails();
  const int most = one_host ? kMostPieces : kMostPiecesPerHost * s.hosts->count();
  return static_cast<int>(std::clamp<std::size_t>(bytes / least, 1, most));
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
  if (accumulates_in_itself(s.dtype))
    return {"chain", "staged through the host, one neighbour each"};
  return {"two_shot", "staged through the host, and a chain would round at every hop"};
}

// Whether the data of all ranks of a host fits into one message between hosts, which then goes
// along with the agreement on the call. A call with sizes that only some ranks know has 0 bytes.
bool fits_message(const SelectionKey& s) {
  if (s.hosts == nullptr || s.bytes == 0) return false;
  std::size_t most = 0;
  for (int h = 0; h < s.hosts->count(); ++h) most = std::max(most, s.hosts->ranks(h).size());
  return s.bytes * most <= kMessageBetweenHosts;
}

// Between two hosts, a chain has as few hops as an exchange of sums, and fewer waits within the
// hosts: with 2 x 4 ranks on two cores, an all_reduce of 256 KiB took half of the time at 10
// Gbit/s. The exchange, whose links are busy from the start, is 1.1 to 1.2 times as fast from 1 MiB
// on.
constexpr std::size_t kSumsOfTwoHostsBytes = 512 * 1024;

// Whether hosts exchange their sums: if the order of addition is free.
bool prefers_sums(const SelectionKey& s) {
  if (s.keeps_order && !is_integer(s.dtype)) return false;
  return s.hosts->count() > 2 || !s.hosts->in_rank_order() || s.bytes >= kSumsOfTwoHostsBytes;
}

Default reduction_between_hosts(const SelectionKey& s) {
  if (!fits_message(s) && prefers_sums(s))
    return {"host_direct", "hosts exchange their sums, as the order of addition is free"};
  if (!fits_message(s) && s.hosts->in_rank_order())
    return {"host_chain", "each host goes on with the sum of the hosts before it"};
  if (s.collective != Collective::all_reduce) return {"direct", "one hop between hosts"};
  if (fits_message(s)) return {"one_shot", "small: one message from host to host"};
  return {"two_shot", "hosts exchange all data, because their ranks are not consecutive"};
}

Default default_of(const SelectionKey& s) {
  const bool reduces = s.collective == Collective::all_reduce ||
                       s.collective == Collective::reduce ||
                       s.collective == Collective::reduce_scatter;
  if (s.topology == Topology::hosts && reduces) return reduction_between_hosts(s);
  if (s.collective == Collective::all_reduce) return all_reduce_on(s);
  if (s.collective == Collective::barrier) return {"barrier", "the only barrier algorithm"};
  return {"direct", "one hop"};
}

}  // namespace

Choice choose(const SelectionKey& s, std::string_view named, bool explain) {
  const Default by_default = default_of(s);
  const Algorithm& algorithm = find(s.collective, named.empty() ? by_default.name : named);
  require(algorithm.in_place || !s.in_place, name(s.collective), ": algorithm '", algorithm.name,
          "' cannot run in place; give it an output of its own");
  const bool first_sends = named.empty() && fits_message(s);
  Choice choice{&algorithm, pieces_for(s), first_sends ? HostSenders::first : HostSenders::all, {}};
  if (!explain) return choice;
  const bool keeps_contract = algorithm.keeps_contract(s.dtype);
  choice.reason = named.empty() ? by_default.reason
                  : keeps_contract
                      ? "asked for by name"
                      : "asked for by name; not the left fold in rank order for this dtype";
  return choice;
}

}  // namespace pycollect
