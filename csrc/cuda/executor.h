// Runs a compiled plan in one process, on the memory of any number of devices: enqueues its levels
// on one stream, or its `Schedule` on several, through `Api`. No kernel waits for another. A run
// blocks the host only if a rank is in host memory: when it has been enqueued, that memory has been
// read and contains the results, except pinned memory in a capture.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "../plan/compiled_plan.h"
#include "events.h"
#include "pinned_ring.h"
#include "schedule.h"

namespace pycollect::cuda {

// The device of one rank's memory, and the streams of its tasks. Tasks and ranks may share streams:
// with one device and one stream for all, each level is one launch, without a schedule and events.
// A rank's streams belong to its device. A rank in host memory runs no steps (see `stage`), and its
// streams may belong to any device.
struct RankStreams {
  Device device;  // kHost: host memory, pinned or not
  // Torch's current stream: orders the run after earlier and before later work, and runs the rank's
  // folds and copies.
  Stream caller;
  // Run copies to `Buffer::host`, and from it. If they are not the caller stream, copies in both
  // directions and folds overlap in a staged plan.
  Stream d2h = caller;
  Stream h2d = caller;
  bool operator==(const RankStreams&) const = default;
};

struct CallStreams {
  std::vector<RankStreams> ranks;
  uint64_t capture = 0;  // number of the capture of all caller streams (see capture_of); 0: none
};

// Returns the number of the capture that all these streams are in; 0: none is in a capture. Throws
// ValueError if only some of them are, or if they are in different captures.
uint64_t capture_of(Api& api, DeviceGuard& device, std::span<const Stream> callers);

// Throws ValueError or TypeError if the executor cannot run this call. During a capture no memory
// may be pageable.
void check_call(const BoundPlan& call, const CallStreams& streams_of_ranks);

// Owns the events and pinned rings, and caches schedules. Thread-safe.
class Executor {
 public:
  Executor(Api& api, HostMemoryOps& host) : events_(api), rings_(api, host) {}

  // Loads the kernels of a call that check_call accepts, enqueues the run and returns. On each
  // rank's caller stream, earlier work comes before the run, and later work finds its results.
  // Passes errors of the Api through, after it has ordered the caller streams behind all enqueued
  // work. Changes the current device.
  void enqueue(const BoundPlan& call, const CallStreams& streams_of_ranks, DeviceGuard& device);

  EventPool& events() { return events_; }

 private:
  struct ScheduleKey {
    uint64_t compiled;
    StreamMap at;
    auto operator<=>(const ScheduleKey&) const = default;
  };
  std::shared_ptr<const Schedule> scheduled(const CompiledPlan& compiled, const StreamMap& at);

  EventPool events_;
  PinnedRingPool rings_;
  std::mutex mutex_;
  std::map<ScheduleKey, std::shared_ptr<const Schedule>> schedules_;
};

}  // namespace pycollect::cuda
