#include "peers.h"

#include "../plan/error.h"

namespace pycollect::cuda {

PeerAccess Peers::access(Device from, Device to) {
  if (from == to) return {true};
  PeerAccess found;
  {
    const std::lock_guard lock(mutex_);
    const auto known = known_.find({from, to});
    if (known != known_.end()) return known->second;
    found.asked = questions_.ask(from, to);
    if (found.asked) found.defect = questions_.try_out(from, to);
    known_[{from, to}] = found;
  }
  // The warning is printed without the lock, because its writer may wait for a thread that asks for
  // peer access.
  if (!found.defect.empty())
    questions_.warn(text("cuda:", from, " is said to reach the memory of cuda:", to, ", but ",
                         found.defect, "; copies between them go through the host"));
  return found;
}

}  // namespace pycollect::cuda
