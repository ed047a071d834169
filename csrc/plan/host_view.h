// One host's part of a plan: the steps that its ranks run, and the transfers that bring data of
// other hosts into its memory and send its own. The ranks of the view are numbered from 0 within
// the host, so the rest of the library runs it like the plan of a world of that size.
#pragma once
#include <optional>
#include <vector>

#include "hosts.h"
#include "plan.h"

namespace pycollect {

// Sends or receives one cell of scratch, host memory or accumulators.
struct HostTransfer {
  enum class Direction : uint8_t { send, receive };
  Direction direction;
  Rank peer;  // on the other host; numbered in the world
  // Counted from 0 for each sender and receiver, in the order in which the one sends and the other
  // posts its receives; so it is the same at both ends.
  int number;
  // A receive that may begin before the first step: no earlier step uses its place, and all
  // receives from the same rank before it are early.
  bool early;
};

struct HostView {
  Plan plan;   // `plan.world` ranks; buffers of more chunks than the caller's, for received cells
  int chunks;  // of the caller's buffers
  std::vector<Rank> world_rank;  // [rank of the view]
  // [step]: for a transfer, its ends, and one slice as destination (receive) or source (send).
  std::vector<std::optional<HostTransfer>> transfers;
  std::vector<int> chunk_of;   // [step]: a chunk of the caller's buffers of the same size
  std::vector<bool> finishes;  // [step]: completes a reduction over all ranks of the world
  // Most cells of scratch and host memory, and of accumulators, that any rank of the view needs.
  int cells = 0, partial_cells = 0;
  // Whether of this host only the first rank makes transfers, of data that the ranks copy from
  // their own buffers.
  bool packs = false;
};

// Whether every rank sends its own data to other hosts, or the first rank of a host all of it.
// Fewer messages are faster for small data.
enum class HostSenders : uint8_t { all, first };

// `staged`: a plan for ranks that share scratch, host memory and accumulators, and nothing else
// (see for_processes), of the world or of this host (AlgorithmParams::host): the view is the same.
// `hosts` null: one host. Throws ValueError if a step writes the memory of a
// rank on another host than its own.
HostView host_view(const Plan& staged, bool in_place, const Hosts* hosts, int host,
                   HostSenders senders);

}  // namespace pycollect
