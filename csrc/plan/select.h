// Selects the algorithm of a call, and explains the choice. Unless the caller names an algorithm,
// only algorithms that keep the numerical contract are chosen, so the choice changes the speed and
// never the bits, except between hosts if the caller allows that.
#pragma once
#include <cstddef>
#include <limits>
#include <string>

#include "host_view.h"
#include "registry.h"

namespace pycollect {

// Topology: how the ranks reach each other's memory.
enum class Topology : uint8_t {
  shared,         // one process, one memory
  peers,          // one process, several memories that every rank reads and writes
  staged,         // one process, several memories, some reached only through the host
  shm_buffers,    // processes with private tensors and small shared staging buffers on the host
  shm_symmetric,  // processes whose tensors lie in shared memory (symmetric heap)
  hosts,  // processes on several hosts, with private tensors and staging buffers on each host
};
inline constexpr std::size_t kTopologies = 6;

// Selection key: the properties of a call that determine its algorithm.
struct SelectionKey {
  Collective collective;
  int world;
  std::size_t bytes;  // of one rank's largest buffer, over all tensors of the call
  DType dtype;
  bool in_place;
  Topology topology = Topology::shared;
  const Hosts* hosts = nullptr;  // must outlive the process; null unless the topology is `hosts`
  // Between hosts: of a staging buffer, and so about what one run of the plan moves of one rank's
  // data.
  std::size_t run_bytes = std::numeric_limits<std::size_t>::max();
  bool keeps_order = true;  // false: a reduction between hosts may add in another order
  bool operator==(const SelectionKey&) const = default;
};

// Most bytes of a host's data that go from host to host in one message with the agreement.
inline constexpr std::size_t kMessageBetweenHosts = 32 * 1024;

// Default size of a staging buffer of ranks on several hosts. The links between hosts are idle when
// a run begins and ends, so runs are few: with 2 x 4 ranks on two cores, which take turns for every
// wait, an all_reduce of 16 MiB on a link of 10 Gbit/s took 190 ms with buffers of 1 MiB, 62 ms
// with 4 MiB, 39 ms with 16 MiB and 34 ms with 32 MiB.
inline constexpr std::size_t kHostsBufferBytes = 16 << 20;

struct Choice {
  const Algorithm* algorithm;
  int pieces;           // number of pieces of a pipeline
  HostSenders senders;  // between hosts
  std::string reason;   // for display; empty unless `explain` is set
};

// `named`: the algorithm that the caller wants, or empty. Throws ValueError for an unknown name,
// and for an algorithm that cannot run in place in a call that is in place.
Choice choose(const SelectionKey& call, std::string_view named, bool explain = false);

}  // namespace pycollect
