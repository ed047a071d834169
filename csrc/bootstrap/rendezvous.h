// Rendezvous of ranks that share only a store. Rank 0 creates the shared memory and publishes where
// to fetch it. Every rank fetches it and publishes an Introduction, which includes whether that
// worked. Every rank reads all of these, so all reach the same result without another exchange.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../shm/abort_state.h"
#include "../shm/failure_detector.h"
#include "../shm/segment.h"
#include "fd_server.h"
#include "peer_info.h"
#include "store.h"

namespace pycollect::shm {

class Rendezvous {
 public:
  // Abort state and failure detection in the shared memory; null until a preparation makes them.
  struct PeerStatus {
    const std::unique_ptr<AbortState>& abort_state;
    const std::unique_ptr<FailureDetector>& peers;
  };
  Rendezvous(Store& store, Rank rank, int world, const Settings& settings, const PeerStatus& signs);

  // Sets up the rank in the shared memory and writes its nonce there.
  using Preparation = std::function<void(std::shared_ptr<Segment>, uint64_t nonce)>;
  // Returns every rank's Introduction when all ranks have mapped the memory and are set up in it.
  // Throws as Group's constructor does; CollectiveError that names the ranks that cannot map it,
  // and why; PeerLost when a rank has died or given up meanwhile.
  std::vector<PeerInfo> share(std::size_t bytes, const Preparation& preparation);

 private:
  std::shared_ptr<Segment> take(PeerInfo& mine, std::size_t bytes);
  Descriptor fetch_from(const PeerInfo& owner) const;
  std::vector<std::string> read_all();
  [[noreturn]] void time_out(const std::vector<Rank>& missing) const;
  bool has_failed_peer() const;
  [[noreturn]] void throw_cause() const;
  [[noreturn]] void fail(uint32_t kind, const std::string& cause) const;

  Store& store_;
  Rank rank_;
  int world_;
  const Settings& settings_;
  Deadline deadline_;
  const PeerStatus peer_status_;
  uint64_t network_space_ = 0;
  std::optional<FdServer> fd_server_;  // only on rank 0
};

}  // namespace pycollect::shm
