// Runs a compiled plan in one process on the memory of any number of devices: what `schedule` says,
// on real streams, through `Api`. Nothing spins, and the host waits for
// nothing but for ranks in host memory: when told to, and always where that is pageable.
#pragma once
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "../plan/bound_plan.h"
#include "events.h"
#include "pinned_ring.h"
#include "streams.h"

namespace pycollect::cuda {

// The message of every refusal to use pageable host memory during a capture.
inline constexpr const char* kPageableInCapture =
    "memory on the host that is not pinned cannot be read or written while a CUDA graph is "
    "captured; pin it with .pin_memory()";

// Where one rank's memory is, and the streams that move it. They may be equal, to each other and to
// other ranks': one device and one stream for all is one launch a level and no event. Streams of a
// rank run on the device that reads and writes for it; for a rank in host memory, which executes
// nothing (see `stage`), any device's.
struct RankStreams {
  Device device;           // kHost: on the host, pinned or not
  Stream caller;           // of what came before and comes after: torch's current stream
  Stream worker;           // for what the rank executes
  Stream sender = worker;  // for copies out to a host, and in from one: beside the worker, so that
  Stream receiver = worker;  // both directions and the folds overlap in a staged plan
};

struct CallStreams {
  std::vector<RankStreams> ranks;
  Stream hub = {};  // its device is kHost: there is none, and joins go pair by pair
  // Are results in pinned memory there, and has it been read, when `run` returns? For pageable
  // memory they are and it has, whatever this says.
  bool host_waits = false;
};

// Owns events and remembers schedules; any thread may call `run` at any time.
class Executor {
 public:
  Executor(Api& api, Host& host, PinnedRingSize size = {})
      : events_(api), rings_(api, host, size) {}

  // Issues everything and returns. On each rank's caller stream all that was issued there before
  // comes first, and what is issued there afterwards finds the result. During a capture all callers
  // must be capturing, and no memory may be pageable. Throws ValueError before anything is issued;
  // what the Api throws passes through, with the callers' streams behind all that had been
  // issued and the device as it was.
  void run(const BoundPlan& call, const CallStreams& streams_of_ranks);

 private:
  struct ScheduleKey {
    uint64_t compiled;
    StreamMap at;
    bool operator==(const ScheduleKey&) const = default;
  };
  struct ScheduleHash {
    std::size_t operator()(const ScheduleKey& key) const;
  };
  std::shared_ptr<const Schedule> scheduled(const Compiled& compiled, const StreamMap& at);

  EventPool events_;
  PinnedRings rings_;
  std::mutex mutex_;
  std::unordered_map<ScheduleKey, std::shared_ptr<const Schedule>, ScheduleHash> schedules_;
};

}  // namespace pycollect::cuda
