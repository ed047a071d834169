// Enqueues list calls on GPUs: on the callers' streams, which are torch's current streams or those
// that the caller named, and on internal streams. No call of the device's library is made here that
// does not go through TorchRuntime and cuda::Api, so tests run all of it without a device.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "../cuda/executor.h"
#include "internal_streams.h"
#include "prepared_call.h"
#include "work.h"

namespace pycollect {

// The calls on one kind of device. Thread-safe.
class GpuCalls : public std::enable_shared_from_this<GpuCalls> {
 public:
  GpuCalls(std::shared_ptr<TorchRuntime> runtime, c10::DeviceType kind);
  ~GpuCalls();
  GpuCalls(const GpuCalls&) = delete;
  GpuCalls& operator=(const GpuCalls&) = delete;

  TorchRuntime& runtime() const { return *runtime_; }

  // Enqueues a call after earlier work on the ranks' streams, and before later work.
  void run(const PreparedCall& prepared);
  // Like run(), but on side streams: the callers' streams wait for the call only in wait() of the
  // returned work.
  std::shared_ptr<Work> enqueue(PreparedCall prepared);

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

  std::vector<cuda::RankStreams> caller_streams(const PreparedCall& prepared) const;
  EnqueueContext context_of(cuda::DeviceGuard& device, const PreparedCall& prepared, bool is_async);
  bool is_multi_device(cuda::DeviceGuard& device, const EnqueueContext& context) const;
  std::vector<cuda::Stream> producers_of(cuda::DeviceGuard& device, const PreparedCall& prepared,
                                         const EnqueueContext& context) const;
  void choose_streams(const PreparedCall& prepared, EnqueueContext& context) const;
  void enqueue_parts(cuda::DeviceGuard& device, const PreparedCall& prepared,
                     const EnqueueContext& context);
  void enqueue_layout_copies(cuda::DeviceGuard& device, const PreparedCall& prepared,
                             const EnqueueContext& context) const;
  void keep_for_graph(cuda::DeviceGuard& device, const PreparedCall& prepared,
                      const EnqueueContext& context);
  // Makes each later stream wait for the work that is now on the earlier ones of its device.
  void order(cuda::DeviceGuard& device, const std::vector<cuda::Stream>& earlier,
             const std::vector<cuda::Stream>& later, uint64_t capture);
  void order_after_failure(cuda::DeviceGuard& device, const EnqueueContext& context) noexcept;
  bool record_side_streams(const PreparedCall& prepared, const EnqueueContext& context) const;
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

}  // namespace pycollect
