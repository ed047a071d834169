#include "peer_access.h"

#include "../plan/error.h"

namespace pycollect::cuda {

PeerAccess PeerAccessCache::access(Device from, Device to) {
  if (from == to) return {true};
  PeerAccess found;
  {
    const std::lock_guard lock(mutex_);
    const auto known = known_.find({from, to});
    if (known != known_.end()) return known->second;
    found.reported = callbacks_.query(from, to);
    if (found.reported) found.defect = callbacks_.test(from, to);
    known_[{from, to}] = found;
  }
  // Warns without the lock, because the callback may wait for a thread that calls `access`.
  if (!found.defect.empty())
    callbacks_.warn(text("the driver reports that cuda:", from, " can access the memory of cuda:",
                         to, ", but ", found.defect, "; copies between them go through the host"));
  return found;
}

}  // namespace pycollect::cuda
