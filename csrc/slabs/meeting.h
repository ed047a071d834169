// How ranks find out, at the group's first call with tensors on GPUs, how their GPUs reach each
// other: they take one step after the other together and try what it gives, with a real write, read
// and wait of every pair, so that all come to the same end whichever rank it fails on.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "dock.h"

namespace pycollect::slabs {

struct Ask {
  std::shared_ptr<shm::Group> group;
  std::shared_ptr<Gpu> gpu;
  std::shared_ptr<Tracts> tracts;  // of the same
  Stream stream;           // the group's own, on the device that this rank's slab is to be on
  std::size_t slot_bytes;  // the same on all ranks
};

// `dock` is null where that does not work; `why` says what was in its way, rank by rank.
struct Found {
  std::shared_ptr<Dock> dock = {};
  std::string why = {};
};

// The same on all ranks. Throws PeerLost and Timeout as Group says.
Found meet(const Ask& ask, const shm::Occasion& occasion);

}  // namespace pycollect::slabs
