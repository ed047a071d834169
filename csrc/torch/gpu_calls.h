// Enqueues list calls on GPUs: on the callers' streams, which are torch's current streams or those
// that the caller named, and on internal streams. No call of the device's library is made here that
// does not go through TorchRuntime and cuda::Api, so tests run all of it without a device.
#pragma once
#include <atomic>
#include <memory>
#include <span>

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
  // A call that is about to be enqueued.
  struct Issue {
    std::vector<cuda::Stream> callers;   // [rank]
    std::vector<cuda::Stream> distinct;  // the same, each once
    uint64_t capture;                    // number of the capture that all of them are in; 0: none
    std::shared_ptr<InternalStreams> internal;
    bool uses_internal = false;
    std::vector<cuda::CallStreams> parts = {};
  };

  std::vector<cuda::Stream> callers_of(const PreparedCall& prepared) const;
  Issue issue_of(cuda::DeviceGuard& device, const PreparedCall& prepared);
  void prepare_parts(const PreparedCall& prepared, Issue& issue) const;
  void enqueue_parts(cuda::DeviceGuard& device, const PreparedCall& prepared, const Issue& issue);
  void keep_for_graph(cuda::DeviceGuard& device, const PreparedCall& prepared, const Issue& issue);
  // Makes the streams in `later`, except `earlier`, wait for the work that is now on `earlier`.
  void order(cuda::DeviceGuard& device, cuda::Stream earlier, std::span<const cuda::Stream> later,
             uint64_t capture);
  void order_after_producers(cuda::DeviceGuard& device, const PreparedCall& prepared,
                             const Issue& issue);
  void order_producers_after(cuda::DeviceGuard& device, const PreparedCall& prepared,
                             const Issue& issue);
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
