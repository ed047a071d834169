// CudaIpcCommunicator: a rank's state for a group's collectives through GPU memory, made by the GPU
// rendezvous. It has the mappings of the peers' staging buffers, the signals between the ranks'
// streams, and run numbers of its own (the host transport counts separately). All work is on one
// stream of the rank; the host enqueues a wait there only after a peer has enqueued the signal.
#pragma once
#include <memory>

#include "../plan/select.h"
#include "staging_buffer.h"
#include "symmetric_memory.h"
#include "watchdog.h"

namespace pycollect::cuda_ipc {

// Registers pages of a group's segment with one device.
class RegisteredHostMemory {
 public:
  RegisteredHostMemory(CudaIpcMemory& gpu, Device device, std::byte* host, std::size_t bytes,
                       std::shared_ptr<ipc::Segment> segment)
      : gpu_(gpu),
        device_(device),
        segment_(std::move(segment)),
        host_(host),
        base_(gpu.register_host(device, host, bytes)) {}
  ~RegisteredHostMemory();  // unregisters it, unless `abandon`ed
  RegisteredHostMemory(const RegisteredHostMemory&) = delete;
  RegisteredHostMemory& operator=(const RegisteredHostMemory&) = delete;
  std::byte* base() const { return base_; }  // address on the device
  // Leaves it registered, and mapped until the process ends: the device may still access it, and
  // other memory must not get a registered address.
  void abandon() {
    abandoned_ = true;
    leak(segment_);
  }

 private:
  CudaIpcMemory& gpu_;
  const Device device_;
  const std::shared_ptr<ipc::Segment> segment_;
  std::byte *host_, *base_;
  bool abandoned_ = false;
};

class CudaIpcCommunicator {
 public:
  struct Resources {
    std::shared_ptr<ipc::Group> group;
    std::shared_ptr<CudaIpcMemory> gpu;
    Stream stream;
    SignalPad signal_pad;
    std::shared_ptr<SymmetricMemory> symmetric_memory;
    std::unique_ptr<StagingBuffer> staging_buffer;
    std::unique_ptr<RegisteredHostMemory> registered;
    std::shared_ptr<Watchdog> watchdog;
    bool multi_gpu;  // the ranks use several GPUs
  };
  explicit CudaIpcCommunicator(Resources resources);
  ~CudaIpcCommunicator();  // call after `close`
  CudaIpcCommunicator(const CudaIpcCommunicator&) = delete;
  CudaIpcCommunicator& operator=(const CudaIpcCommunicator&) = delete;

  ipc::Group& group() const { return *resources_.group; }
  CudaIpcMemory& gpu() const { return *resources_.gpu; }
  Stream stream() const { return resources_.stream; }
  const StagingBuffer& staging_buffer() const { return *resources_.staging_buffer; }
  SymmetricMemory& symmetric_memory() const { return *resources_.symmetric_memory; }
  // Topology for tensors that go through staging buffers, and for tensors in symmetric GPU memory
  // that peers access in place.
  Topology topology() const {
    return resources_.multi_gpu ? Topology::cuda_ipc_buffers_multi_gpu : Topology::cuda_ipc_buffers;
  }
  Topology zero_copy_topology() const {
    return resources_.multi_gpu ? Topology::cuda_ipc_symmetric_multi_gpu
                                : Topology::cuda_ipc_symmetric;
  }
  const std::byte* guard() const { return resources_.registered->base(); }  // see Launch::guard

  // Number of the next run; only for the thread that runs the group's calls.
  uint64_t run() const { return run_; }
  void begin_run(uint64_t run) { run_ = run; }

  // Stream memory operations on the ranks' counters, so no host waits for a device and no kernel
  // spins. `signal` signals `value` after the work already on the stream. `wait` makes later work
  // wait until `r` signals `value`; it enqueues that wait only once `r` has enqueued the signal,
  // and throws as Group::await does until then, so no stream waits for a signal that may never
  // come.
  void signal(uint64_t value);
  void wait(Rank r, uint64_t value, const ipc::OpContext& context);

  // Ends a call when all of its work is on the stream; the watchdog watches that work since the
  // call's first wait. `query` asks for an event at the end, and throws the device's error. Until
  // the work has ended it holds `exposed`, the memory that peers access in place.
  std::shared_ptr<PendingWork> end_call(const ipc::OpContext& context, std::function<bool()> query,
                                        std::shared_ptr<void> exposed);
  // Ends a call after a failure of this rank's device, on which the work's end is not marked.
  void end_call(std::exception_ptr error);
  // Releases memory exposed by calls that have ended; otherwise the next call releases it.
  void free_returned() { resources_.watchdog->free_returned(); }

  // Shuts down: gives pending work time until the deadline, then aborts the group, and releases all
  // memory. If this rank's stream does not end even then, its memory is never freed. Returns the
  // first error that no caller has received.
  std::exception_ptr close(ipc::Deadline deadline);
  bool has_abandoned() const { return abandoned_; }  // after close(): whether memory is not freed

 private:
  std::byte* word(Rank r) const {
    return resources_.registered->base() + resources_.signal_pad.offset(r);
  }
  void begin_work(const ipc::OpContext& context);
  bool stream_has_ended() noexcept;

  Resources resources_;
  std::vector<uint64_t> awaited_;      // [rank]: its latest signal that this stream waits for
  uint64_t run_ = 1;                   // counters begin at zero, which is before every run
  uint64_t works_ = 0;                 // number of calls that have begun work, see Counter::ended
  std::shared_ptr<PendingWork> work_;  // of the call that runs; null: it has not waited yet
  bool closed_ = false, abandoned_ = false;
};

}  // namespace pycollect::cuda_ipc
