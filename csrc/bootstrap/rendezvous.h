// Rendezvous of ranks that share only a store. Rank 0 creates the shared memory and publishes where
// to fetch it. Every rank fetches it and publishes a PeerInfo, which includes the reason if that
// failed. Every rank reads all PeerInfo, so all reach the same result without another exchange.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../group/abort_state.h"
#include "../group/failure_detector.h"
#include "../group/segment.h"
#include "fd_server.h"
#include "peer_info.h"
#include "store.h"

namespace pycollect::ipc {

// Thrown by a rendezvous whose ranks are on several hosts: each host then needs a group of its own.
// Not an std::exception, because it is not an error.
struct SeveralHosts {
  std::vector<PeerInfo> ranks;
};

class Rendezvous {
 public:
  // Abort state and failure detector in the shared memory; null until the preparation creates them.
  struct FailureSources {
    const std::unique_ptr<AbortState>& abort_state;
    const std::unique_ptr<FailureDetector>& peers;
  };
  Rendezvous(Store& store, Rank rank, int world, const GroupSettings& settings,
             const FailureSources& failure_sources);

  // Sets up the rank in the shared memory and writes its nonce there.
  using Preparation = std::function<void(std::shared_ptr<Segment>, uint64_t nonce)>;
  // Returns every rank's PeerInfo when all ranks have mapped the memory and are set up in it.
  // Throws as Group's constructor does; SeveralHosts, on all ranks alike; CollectiveError, naming
  // ranks and reasons, if a rank cannot map it; PeerLost if a rank dies or fails meanwhile.
  std::vector<PeerInfo> share(std::size_t bytes, const Preparation& preparation);

 private:
  std::shared_ptr<Segment> obtain_segment(PeerInfo& mine, std::size_t bytes);
  UniqueFd fetch_from(const PeerInfo& owner) const;
  std::vector<std::string> read_all();
  [[noreturn]] void time_out(const std::vector<Rank>& missing) const;
  bool has_failed_peer() const;
  [[noreturn]] void throw_cause() const;
  [[noreturn]] void fail(uint32_t kind, const std::string& cause) const;

  Store& store_;
  Rank rank_;
  int world_;
  const GroupSettings& settings_;
  Deadline deadline_;
  const FailureSources failure_sources_;
  uint64_t network_space_ = 0;
  std::optional<FdServer> fd_server_;  // only on rank 0
};

}  // namespace pycollect::ipc
