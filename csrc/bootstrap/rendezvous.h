// Rendezvous of ranks that share only a store. Rank 0 creates the shared memory and publishes where
// to fetch it. Every rank fetches it, sets itself up in it, and publishes a PeerInfo, which
// includes the reason if that failed. Every rank reads all PeerInfo, so all reach the same result
// without another exchange.
#pragma once
#include <memory>
#include <vector>

#include "../group/failures.h"
#include "../group/segment.h"
#include "../group/segment_layout.h"
#include "peer_info.h"
#include "store.h"

namespace pycollect::ipc {

// Thrown by a rendezvous whose ranks are on several hosts: each host then needs a group of its own.
// Not an std::exception, because it is not an error.
struct SeveralHosts {
  std::vector<PeerInfo> ranks;
};

// What a rank has of its group after the rendezvous.
struct Membership {
  std::shared_ptr<Segment> segment;
  std::unique_ptr<AbortState> abort_state;  // in the segment, as the next one
  std::unique_ptr<FailureDetector> failure_detector;
  std::vector<PeerInfo> ranks;
};

// Returns when all ranks have mapped the memory and are set up in it. Throws as Group's constructor
// does; SeveralHosts, on all ranks alike; CollectiveError, naming ranks and reasons, if a rank
// cannot map it; PeerLost if a rank dies or fails meanwhile.
Membership rendezvous(Store& store, Rank rank, const SegmentLayout& layout,
                      const GroupSettings& settings);

}  // namespace pycollect::ipc
