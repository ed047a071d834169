// The streams of list calls that are not the callers': for the work of ranks, for copies, and for
// asynchronous calls. Eager calls share one set. Each capture of a graph has a set of its own,
// because a stream that has joined a capture belongs to it until its end.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "../cuda/events.h"
#include "torch_runtime.h"

namespace pycollect {

// Thread-safe.
class InternalStreams {
 public:
  InternalStreams(TorchRuntime& runtime, c10::DeviceType kind) : runtime_(runtime), kind_(kind) {}
  InternalStreams(const InternalStreams&) = delete;
  InternalStreams& operator=(const InternalStreams&) = delete;

  cuda::Stream d2h(cuda::Device device) { return stream(device, 0); }
  cuda::Stream h2d(cuda::Device device) { return stream(device, 1); }
  cuda::Stream join(cuda::Device device) { return stream(device, 2); }  // see cuda::StreamMap
  // Runs asynchronous calls in order, in place of a caller's stream.
  cuda::Stream side(cuda::Device device) { return stream(device, 3); }
  // Runs the folds and copies of the ranks with these numbers on the device.
  cuda::Stream worker(cuda::Device device, std::size_t number) {
    constexpr std::size_t kWorkers = 16;
    return stream(device, 4 + number % kWorkers);
  }

  // Records the end of an asynchronous call on the side stream of the current device `device`.
  std::shared_ptr<cuda::SharedEvent> record_async(cuda::EventPool& events, cuda::Device device,
                                                  bool for_capture);
  // Returns the end of the device's last asynchronous call, for which later calls that are not
  // asynchronous wait; null: there was none.
  std::shared_ptr<cuda::SharedEvent> last_async(cuda::Device device) const;

 private:
  friend class StreamSets;
  cuda::Stream stream(cuda::Device device, std::size_t number);

  TorchRuntime& runtime_;
  const c10::DeviceType kind_;
  bool kept_ = false;  // by the graph that captures these streams
  mutable std::mutex mutex_;
  std::map<std::pair<cuda::Device, std::size_t>, cuda::Stream> streams_;
  std::map<cuda::Device, std::shared_ptr<cuda::SharedEvent>> last_async_;
};

// The sets of one kind of device. Thread-safe.
class StreamSets {
 public:
  StreamSets(TorchRuntime& runtime, c10::DeviceType kind);

  // Returns the set of a capture, or of eager calls if `capture` is 0. The set of a capture may
  // serve another capture once nobody holds it. Releasing a set does not call CUDA.
  std::shared_ptr<InternalStreams> of(uint64_t capture);
  // Returns true at the first call for a set: its graph must hold it from then on.
  static bool must_keep(InternalStreams& set) { return !std::exchange(set.kept_, true); }

 private:
  struct Idle {
    std::mutex mutex;
    std::vector<std::unique_ptr<InternalStreams>> sets = {};
  };
  TorchRuntime& runtime_;
  const c10::DeviceType kind_;
  const std::shared_ptr<Idle> idle_ = std::make_shared<Idle>();
  const std::shared_ptr<InternalStreams> eager_;
  std::map<uint64_t, std::weak_ptr<InternalStreams>> captured_;  // guarded by idle_->mutex
};

}  // namespace pycollect
