// Peer access between devices, as the driver reports it and a test confirms it. A pair that fails
// the test counts as one without peer access, and causes one warning. Caches the results; the
// query, the test and the warning are callbacks.
#pragma once
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "../plan/error.h"
#include "api.h"

namespace pycollect::cuda {

struct PeerAccess {
  bool reported = false;    // the driver reports peer access
  std::string defect = {};  // why the test failed; empty if it passed or was not run
  bool works() const { return reported && defect.empty(); }
};

class PeerAccessCache {
 public:
  struct Callbacks {
    std::function<bool(Device from, Device to)> query;        // returns what the driver reports
    std::function<std::string(Device from, Device to)> test;  // returns the defect; once per pair
    std::function<void(const std::string& line)> warn;
  };
  explicit PeerAccessCache(Callbacks callbacks) : callbacks_(std::move(callbacks)) {}

  // Returns whether work on `from` can read and write the memory of `to`. Thread-safe. Passes
  // errors of a callback through, and then tests the pair again in the next call.
  PeerAccess access(Device from, Device to);

 private:
  const Callbacks callbacks_;
  std::mutex mutex_;
  std::map<std::pair<Device, Device>, PeerAccess> known_;
};

inline PeerAccess PeerAccessCache::access(Device from, Device to) {
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
