// Implements gpus.h with CUDA: runs calls with cuda::Executor on torch's streams and memory.
#include "../gpus.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <chrono>
#include <map>
#include <mutex>
#include <thread>

#include "../../cuda/executor.h"
#include "../../plan/error.h"
#include "../profiler_range.h"
#include "../threads.h"
#include "api.h"
#include "host_memory_ops.h"

namespace pycollect {
namespace {

using c10::cuda::CUDAStream;

cuda::Executor& executor() {
  // Never destroyed, because CUDA is used after main.
  static cuda::Executor& executor = *new cuda::Executor(cuda_api(), torch_host_memory_ops());
  return executor;
}

// Returns an internal stream of a device: of high priority, from torch's pool.
CUDAStream internal_stream(c10::DeviceIndex device, std::size_t number) {
  static std::mutex mutex;
  static auto& cache = *new std::map<c10::DeviceIndex, std::vector<CUDAStream>>;
  const std::lock_guard lock(mutex);
  auto& streams = cache[device];
  while (streams.size() <= number) streams.push_back(c10::cuda::getStreamFromPool(true, device));
  return streams[number];
}

// Returns each rank's caller stream: the one that the caller named, or the current stream of the
// rank's device. A rank in host memory uses the first GPU of the call.
std::vector<CUDAStream> callers_of(const PreparedCall& prepared) {
  std::vector<CUDAStream> callers;
  c10::DeviceIndex first = -1;
  for (at::Device d : prepared.devices)
    if (first < 0 && !d.is_cpu()) first = d.index();
  for (std::size_t r = 0; r < prepared.devices.size(); ++r) {
    const auto device = prepared.devices[r].is_cpu() ? first : prepared.devices[r].index();
    const bool named = r < prepared.streams.size() && prepared.streams[r].has_value();
    callers.push_back(named ? CUDAStream(*prepared.streams[r])
                            : c10::cuda::getCurrentCUDAStream(device));
  }
  return callers;
}

bool all_same(const PreparedCall& prepared, const std::vector<CUDAStream>& callers) {
  return std::all_of(prepared.devices.begin(), prepared.devices.end(),
                     [&](at::Device d) { return d == prepared.devices[0]; }) &&
         std::all_of(callers.begin(), callers.end(),
                     [&](const CUDAStream& s) { return s == callers[0]; });
}

// Numbers of a device's internal streams: workers of its ranks, copies to and from the host, the
// join stream (see cuda::StreamMap), and the side stream, which replaces the caller stream of
// asynchronous calls.
constexpr std::size_t kRankStreams = 16, kD2hStream = kRankStreams, kH2dStream = kD2hStream + 1,
                      kJoinStream = kH2dStream + 1, kSideStream = kJoinStream + 1;

// If the caller named the algorithm, each rank of a device has its own worker stream, so that
// virtual ranks run as independently as ranks on different devices.
cuda::CallStreams call_streams(const PreparedCall& prepared, const DtypePlan& part,
                               const std::vector<CUDAStream>& callers) {
  const bool on_caller_stream = !part.named && prepared.peer_access && all_same(prepared, callers);
  cuda::CallStreams streams;
  std::map<c10::DeviceIndex, std::size_t> used;
  for (std::size_t r = 0; r < prepared.devices.size(); ++r) {
    const auto device = callers[r].device_index();
    const std::size_t number = part.named ? used[device]++ % kRankStreams : 0;
    const cuda::Stream caller = api_stream(callers[r]);
    const auto stream = [&](std::size_t n) {
      return on_caller_stream ? caller : api_stream(internal_stream(device, n));
    };
    streams.ranks.push_back({.device = prepared.devices[r].is_cpu() ? cuda::kHost : device,
                             .caller = caller,
                             .worker = stream(number),
                             .d2h = stream(kD2hStream),
                             .h2d = stream(kH2dStream)});
  }
  if (!on_caller_stream)
    streams.join_stream = api_stream(internal_stream(callers[0].device_index(), kJoinStream));
  return streams;
}

// Prevents torch's allocators from reusing the memory before the stream's work is done.
void record_stream(const at::Tensor& t, const cuda::Stream& s) {
  const CUDAStream stream = torch_stream(s);
  if (t.is_cuda() && t.device().index() == s.device)
    c10::cuda::CUDACachingAllocator::recordStream(t.storage().data_ptr(), stream);
  else if (t.is_cpu() && t.is_pinned())
    at::getHostAllocator(at::kCUDA)->record_event(
        t.data_ptr(), t.storage().data_ptr().get_context(), stream.unwrap());
}
void record_stream(const PreparedCall& prepared, const cuda::CallStreams& streams) {
  for (const Tensors* list : {&prepared.held, &prepared.results})
    for (const at::Tensor& t : *list)
      for (const cuda::RankStreams& p : streams.ranks)
        for (const cuda::Stream& s : {p.worker, p.d2h, p.h2d})
          if (t.numel() > 0 && !(s == p.caller)) record_stream(t, s);
}

bool is_captured(const CUDAStream& s) {
  const c10::cuda::CUDAGuard guard(s.device());
  return cuda_api().is_capturing(api_stream(s));
}

// Copies between different layouts are torch's, which waits for pageable memory; a capture forbids
// that.
void check_transposes(const PreparedCall& prepared) {
  for (const auto& [dst, src] : prepared.transposes)
    for (const at::Tensor* t : {&dst, &src})
      require(t->is_cuda() || t->numel() == 0 || t->is_pinned(), cuda::kPageableInCapture);
}

class GpuWork : public Work {
 public:
  GpuWork(PreparedCall prepared, std::vector<CUDAStream> side_streams)
      : Work(prepared.results), prepared_(std::move(prepared)) {
    for (const CUDAStream& s : side_streams) {
      events_.emplace_back(at::kCUDA);
      events_.back().record(s.unwrap());
    }
  }

  bool wait(std::optional<double> seconds) override {
    if (seconds && !finished_within(*seconds)) return false;
    for (c10::Event& e : events_)
      e.block(c10::cuda::getCurrentCUDAStream(e.device_index()).unwrap());
    return true;
  }
  bool is_completed() override {
    return std::all_of(events_.begin(), events_.end(), [](const auto& e) { return e.query(); });
  }
  // Always null: errors are thrown when the call is enqueued.
  std::exception_ptr exception() override { return nullptr; }

 private:
  bool finished_within(double seconds);

  PreparedCall prepared_;
  std::vector<c10::Event> events_;
};

bool GpuWork::finished_within(double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!is_completed()) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

void enqueue_all(const PreparedCall& prepared, const std::vector<CUDAStream>& callers) {
  // During a capture the host does not wait: results in host memory are complete after a replay.
  const bool captured = std::any_of(callers.begin(), callers.end(), is_captured);
  if (captured) check_transposes(prepared);
  for (const DtypePlan& p : prepared.parts) {
    cuda::CallStreams streams = call_streams(prepared, p, callers);
    streams.host_waits = !captured && std::any_of(prepared.devices.begin(), prepared.devices.end(),
                                                  [](at::Device d) { return d.is_cpu(); });
    record_stream(prepared, streams);
    executor().run({*p.compiled, p.bindings, p.dtype, p.op, p.options}, streams);
  }
  if (prepared.transposes.empty()) return;
  const c10::cuda::CUDAMultiStreamGuard guard(callers);
  for (const auto& [dst, src] : prepared.transposes) copy_strided(dst, src);
}

}  // namespace

bool has_cuda() { return true; }
bool supports(const at::Device& device) { return device.is_cpu() || device.is_cuda(); }

at::Tensor new_bytes_on_gpu(int64_t bytes, at::Device device) {
  return at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
}
at::Tensor new_pinned_bytes(int64_t bytes, at::Device device) {
  const c10::cuda::CUDAGuard guard(device);  // torch checks the current stream for a capture
  return at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(true));
}

bool is_pageable(const void* address) { return !at::detail::getCUDAHooks().isPinnedPtr(address); }

void run_on_gpus(const PreparedCall& prepared) { enqueue_all(prepared, callers_of(prepared)); }

std::shared_ptr<Work> enqueue_on_gpus(PreparedCall prepared) {
  const ProfilerRange range(prepared.call);
  // The call runs on one side stream per device, behind the caller streams. Only wait() makes a
  // stream of the caller wait for it.
  std::vector<CUDAStream> callers = callers_of(prepared), side_streams;
  for (CUDAStream& s : callers) {
    const CUDAStream side = internal_stream(s.device_index(), kSideStream);
    c10::Event ready(at::kCUDA);
    ready.record(s.unwrap());
    ready.block(side.unwrap());
    s = side;
    if (std::find(side_streams.begin(), side_streams.end(), side) == side_streams.end())
      side_streams.push_back(side);
  }
  for (const Tensors* list : {&prepared.held, &prepared.results})
    for (const at::Tensor& t : *list)
      if (t.is_cuda() && t.numel() > 0)
        c10::cuda::CUDACachingAllocator::recordStream(
            t.storage().data_ptr(), internal_stream(t.device().index(), kSideStream));
  enqueue_all(prepared, callers);
  return std::make_shared<GpuWork>(std::move(prepared), std::move(side_streams));
}

}  // namespace pycollect
