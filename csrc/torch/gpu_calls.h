// Enqueues list calls on GPUs: on the callers' streams, which are torch's current streams or those
// that the caller named, and on internal streams. No call of the device's library is made here that
// does not go through TorchRuntime and cuda::Api, so tests run all of it without a device.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "../cuda/events.h"
#include "../cuda/executor.h"
#include "list_call.h"
#include "torch_runtime.h"

namespace pycollect {

// The streams of list calls that are not the callers', each of which is made at its first use: for
// copies through the host, and for asynchronous calls. Thread-safe.
class InternalStreams {
 public:
  InternalStreams(TorchRuntime& runtime, c10::DeviceType kind) : runtime_(runtime), kind_(kind) {}
  ~InternalStreams();
  InternalStreams(const InternalStreams&) = delete;
  InternalStreams& operator=(const InternalStreams&) = delete;

  cuda::Stream d2h(cuda::Device device) { return stream(device, 0); }
  cuda::Stream h2d(cuda::Device device) { return stream(device, 1); }
  // Runs asynchronous calls in order, in place of a caller's stream.
  cuda::Stream side(cuda::Device device) { return stream(device, 2); }

  // Records the end of an asynchronous call on the side stream of the current device `device`.
  std::shared_ptr<cuda::RecordedEvent> record_async(cuda::EventPool& events, cuda::Device device,
                                                    bool for_capture);
  // Returns the end of the device's last asynchronous call, for which later calls that are not
  // asynchronous wait; null: there was none.
  std::shared_ptr<cuda::RecordedEvent> last_async(cuda::Device device) const;

 private:
  cuda::Stream stream(cuda::Device device, int number);

  TorchRuntime& runtime_;
  const c10::DeviceType kind_;
  mutable std::mutex mutex_;
  std::map<std::pair<cuda::Device, int>, cuda::Stream> streams_;
  std::map<cuda::Device, std::shared_ptr<cuda::RecordedEvent>> last_async_;
};

// The calls on one kind of device. Thread-safe.
class GpuCalls : public std::enable_shared_from_this<GpuCalls> {
 public:
  GpuCalls(std::shared_ptr<TorchRuntime> runtime, c10::DeviceType kind);
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
  // Streams, and memory that nobody else keeps. Calls outside of captures share one of these; the
  // calls in a capture have another one, until its graph is destroyed, because a stream that has
  // joined a capture belongs to it until its end.
  struct CallResources {
    InternalStreams streams;
    Tensors kept = {};
  };
  using ResourcesByCapture = std::map<uint64_t, std::shared_ptr<CallResources>>;
  // The streams of a call, which are those of each of its parts.
  struct EnqueueContext : cuda::CallStreams {
    std::vector<cuda::Stream> callers;    // torch's current streams or the named ones, each once
    std::vector<cuda::Stream> distinct;   // the callers of `ranks`: side streams if asynchronous
    std::vector<cuda::Stream> producers;  // to be ordered with the call
    std::shared_ptr<CallResources> resources;  // null: a capture in which no call needs any
    bool is_async = false;
    bool keeps_memory = false;  // whether the graph must keep the call's memory on devices

    InternalStreams& internal() const { return resources->streams; }
  };

  std::vector<cuda::RankStreams> caller_streams(const ListCall& call) const;
  EnqueueContext context_of(cuda::DeviceGuard& device, const ListCall& call, bool is_async);
  bool is_multi_device(cuda::DeviceGuard& device, const EnqueueContext& context) const;
  std::vector<cuda::Stream> producers_of(cuda::DeviceGuard& device, const ListCall& call,
                                         const EnqueueContext& context) const;
  static void choose_streams(EnqueueContext& context, bool staged);
  void enqueue_parts(cuda::DeviceGuard& device, const ListCall& call,
                     const EnqueueContext& context);
  void enqueue_layout_copies(cuda::DeviceGuard& device, const ListCall& call,
                             const EnqueueContext& context) const;
  std::shared_ptr<CallResources> resources_of(cuda::DeviceGuard& device,
                                              const EnqueueContext& context, bool needed);
  static Tensors kept_by_graph(const ListCall& call, const EnqueueContext& context);
  // Makes each later stream wait for the work that is now on the earlier ones of its device.
  void order(cuda::DeviceGuard& device, const std::vector<cuda::Stream>& earlier,
             const std::vector<cuda::Stream>& later, uint64_t capture);
  void order_after_failure(cuda::DeviceGuard& device, const EnqueueContext& context) noexcept;
  bool record_side_streams(const ListCall& call, const EnqueueContext& context) const;
  void free_ended_graphs();

  const std::shared_ptr<TorchRuntime> runtime_;
  const c10::DeviceType kind_;
  cuda::Api& api_;
  cuda::Executor executor_;
  const std::shared_ptr<CallResources> eager_;  // of calls outside of captures
  std::mutex mutex_;  // never held while CUDA is called: CUDA may announce a graph's end then
  ResourcesByCapture graphs_;
  // Of destroyed graphs. They are freed by a later call, because freeing may call CUDA, which is
  // forbidden where CUDA announces the end of a graph.
  ResourcesByCapture ended_graphs_;
};

// The Work of an asynchronous call on GPUs.
class GpuWork final : public Work {
 public:
  // `ends`: an event after the call on each of its devices. `owned`: torch's allocator does not
  // reuse the tensors' memory before these events, whenever the tensors are released. `capture`:
  // the number of the capture that the call is in; 0: none.
  GpuWork(std::shared_ptr<GpuCalls> calls, ListCall call,
          std::vector<std::shared_ptr<cuda::RecordedEvent>> ends, uint64_t capture, bool owned);
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
  const std::vector<std::shared_ptr<cuda::RecordedEvent>> ends_;
  const uint64_t capture_;
  const bool owned_;
  bool waited_ = false;
  std::mutex mutex_;
  ListCall call_;  // until the first wait()
};

}  // namespace pycollect
