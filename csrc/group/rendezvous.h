// Rendezvous of ranks that share only a store. Rank 0 creates the shared memory and publishes where
// to fetch it. Every rank fetches it, sets itself up in it, and publishes a PeerInfo, which
// includes the reason if that failed. Every rank reads all PeerInfo, so all reach the same result
// without another exchange.
#pragma once
#include <sys/types.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "failures.h"
#include "placement.h"
#include "segment.h"
#include "segment_layout.h"

namespace pycollect::ipc {

struct GroupSettings;

// Bootstrap store: keys and values that every rank of a group can write and read before the ranks
// share memory. csrc/torch implements it with a torch Store, tests with files.
class Store {
 public:
  virtual ~Store() = default;
  virtual void post(const std::string& key, const std::string& value) = 0;
  // Waits until ranks have posted all keys, and returns their values. Throws Timeout.
  virtual std::vector<std::string> read_all(const std::vector<std::string>& keys,
                                            Deadline deadline) = 0;
  // Returns what to tell other ranks of an error of the store itself; empty: it is another error.
  virtual std::string failure(const std::exception&) const { return ""; }
  std::string read(const std::string& key, Deadline deadline) {
    return read_all({key}, deadline)[0];
  }
};

// Bootstrap information that a rank publishes in the store before the ranks share memory, and the
// checks of all ranks' information. Every rank checks the same data, so all continue or all throw.
struct PeerInfo {
  std::string host, boot;  // host name, for messages; random id that the kernel made at boot
  // Ranks with equal domains are on one host, and have to share memory. It is PYCOLLECT_HOST, or
  // else the boot and the network namespace, in which descriptors can be passed.
  std::string domain;
  pid_t pid = 0;
  uid_t user = 0;
  // Ids of namespaces; 0: unknown. User ids and socket names are comparable only within one.
  uint64_t user_space = 0, network_space = 0;
  uint64_t nonce = 0;           // random number, which the rank also writes into the shared memory
  uint64_t fd_server = 0;       // rank 0's, which hands out the descriptor of the shared memory
  CoreSet cores = {};           // cores on which the rank may run; 0: unknown
  std::string common_settings;  // settings that must be equal on all ranks
  std::string host_settings;    // settings that must be equal on all of a host
  std::string failure;          // why the rank cannot share memory; empty: it can

  std::string encode() const;
  static PeerInfo decode(const std::string& text);
};

// Returns the bootstrap information of this process; `fd_server` and `failure` are filled in later.
PeerInfo describe_self(const GroupSettings& settings, int world);

// Returns the hosts of the ranks.
Hosts hosts_of(const std::vector<PeerInfo>& ranks);
// Returns a name for each host: host names, or PYCOLLECT_HOST; the
// host's number too if that is another host's name.
std::vector<std::string> names_of(const Hosts& hosts, const std::vector<PeerInfo>& ranks);
// Throws std::invalid_argument, naming hosts and ranks, if the ranks are on several hosts.
void require_one_host(const std::vector<PeerInfo>& ranks, const std::string& group);
// Throws std::invalid_argument, naming both settings, if a rank's settings differ from rank 0's, or
// from those of the first rank on its host.
void require_same_settings(const std::vector<PeerInfo>& ranks, const std::string& group);
// Throws CollectiveError, naming ranks, reasons and remedies, if a rank cannot share the memory.
void require_shared(const std::vector<PeerInfo>& ranks, const std::string& group);

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
