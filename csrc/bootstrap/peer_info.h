// Bootstrap information that a rank publishes in the store before the ranks share memory, and the
// checks of all ranks' information. Every rank checks the same data, so all continue or all throw.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../group/group_settings.h"
#include "../group/numa_nodes.h"
#include "hosts.h"

namespace pycollect::ipc {

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

}  // namespace pycollect::ipc
