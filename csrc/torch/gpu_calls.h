// Enqueues list calls on GPUs: on the callers' streams, which are torch's current streams or those
// that the caller named, and on internal streams. No call of the device's library is made here that
// does not go through TorchRuntime and cuda::Api, so tests run all of it without a device.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "../cuda/events.h"
#include "../cuda/executor.h"
#include "list_call.h"
#include "torch_runtime.h"

namespace pycollect {

// The streams of list calls that are not the callers': for copies through the host, and for
// asynchronous calls. Eager calls share one set. Each capture of a graph has a set of its own,
// because a stream that has joined a capture belongs to it until its end. Thread-safe.
class InternalStreams {
 public:
  InternalStreams(TorchRuntime& runtime, c10::DeviceType kind) : runtime_(runtime), kind_(kind) {}
  InternalStreams(const InternalStreams&) = delete;
  InternalStreams& operator=(const InternalStreams&) = delete;

  cuda::Stream d2h(cuda::Device device) { return stream(device, 0); }
  cuda::Stream h2d(cuda::Device device) { return stream(device, 1); }
  // Runs asynchronous calls in order, in place of a caller's stream.
  cuda::Stream side(cuda::Device device) { return stream(device, 2); }

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

// The calls on one kind of device. Thread-safe.
class GpuCalls : public std::enable_shared_from_this<GpuCalls> {
 public:
  GpuCalls(std::shared_ptr<TorchRuntime> runtime, c10::DeviceType kind);
  ~GpuCalls();
  GpuCalls(const GpuCalls&) = delete;
  GpuCalls& operator=(const GpuCalls&) = delete;

  TorchRuntime& runtime() const { return *runtime_; }

  // Enqueues a call after earlier work on the ranks' streams, and before later work.
  void run(const ListCall& call);
  // Like run(), but on side streams: the callers' streams wait for the call only in wait() of the
  // returned work.
  std::shared_ptr<Work> enqueue(ListCall call);

 private:
  friend class GpuWork;
  // Memory and streams that a captured graph uses.
  struct GraphMemory {
    Tensors tensors = {};
    std::shared_ptr<InternalStreams> streams = {};
    GraphMemory* next = nullptr;
  };
  // The streams of a call, which are those of each of its parts.
  struct EnqueueContext : cuda::CallStreams {
    std::vector<cuda::Stream> callers;    // torch's current streams or the named ones, each once
    std::vector<cuda::Stream> distinct;   // the callers of `ranks`: side streams if asynchronous
    std::vector<cuda::Stream> producers;  // to be ordered with the call
    std::shared_ptr<InternalStreams> internal;
    bool is_async = false;
    bool keeps_memory = false;  // whether the graph must keep the call's memory on devices
    bool uses_internal = false;
  };

  std::vector<cuda::RankStreams> caller_streams(const ListCall& call) const;
  EnqueueContext context_of(cuda::DeviceGuard& device, const ListCall& call, bool is_async);
  bool is_multi_device(cuda::DeviceGuard& device, const EnqueueContext& context) const;
  std::vector<cuda::Stream> producers_of(cuda::DeviceGuard& device, const ListCall& call,
                                         const EnqueueContext& context) const;
  void choose_streams(const ListCall& call, EnqueueContext& context) const;
  void enqueue_parts(cuda::DeviceGuard& device, const ListCall& call,
                     const EnqueueContext& context);
  void enqueue_layout_copies(cuda::DeviceGuard& device, const ListCall& call,
                             const EnqueueContext& context) const;
  void keep_for_graph(cuda::DeviceGuard& device, const ListCall& call,
                      const EnqueueContext& context);
  // Makes each later stream wait for the work that is now on the earlier ones of its device.
  void order(cuda::DeviceGuard& device, const std::vector<cuda::Stream>& earlier,
             const std::vector<cuda::Stream>& later, uint64_t capture);
  void order_after_failure(cuda::DeviceGuard& device, const EnqueueContext& context) noexcept;
  bool record_side_streams(const ListCall& call, const EnqueueContext& context) const;
  void free_graph_memory();

  const std::shared_ptr<TorchRuntime> runtime_;
  const c10::DeviceType kind_;
  cuda::Api& api_;
  cuda::Executor executor_;
  StreamSets sets_;
  // Memory of destroyed graphs. It is freed by a later call, because freeing may call CUDA, which
  // is forbidden where CUDA announces the end of a graph.
  std::atomic<GraphMemory*> unused_graph_memory_{nullptr};
};

// The Work of an asynchronous call on GPUs.
class GpuWork final : public Work {
 public:
  // `ends`: an event after the call on each of its devices. `owned`: torch's allocator does not
  // reuse the tensors' memory before these events, whenever the tensors are released. `capture`:
  // the number of the capture that the call is in; 0: none.
  GpuWork(std::shared_ptr<GpuCalls> calls, ListCall call,
          std::vector<std::shared_ptr<cuda::SharedEvent>> ends, uint64_t capture, bool owned);
  ~GpuWork() override;

  bool wait(std::optional<double> seconds) override;
  bool is_completed() override;
  // Always null: errors are thrown when the call is enqueued.
  std::exception_ptr exception() override { return nullptr; }

 private:
  bool finished_within(double seconds);
  std::vector<cuda::Stream> current_streams() const;  // of the devices of the ends
  uint64_t capture_of(const std::vector<cuda::Stream>& streams) const;
  void order(const std::vector<cuda::Stream>& streams);

  const std::shared_ptr<GpuCalls> calls_;
  const std::vector<std::shared_ptr<cuda::SharedEvent>> ends_;
  const uint64_t capture_;
  const bool owned_;
  bool waited_ = false;
  std::mutex mutex_;
  ListCall call_;  // until the first wait()
};

}  // namespace pycollect
