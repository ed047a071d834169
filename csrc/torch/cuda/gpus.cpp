// The answers of a build with CUDA: torch's streams and memory for the executor.
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
#include "host.h"

namespace pycollect {
namespace {

using c10::cuda::CUDAStream;

cuda::Executor& executor() {
  static cuda::Executor& it =
      *new cuda::Executor(cuda_api(), torch_host());  // outlives main, as CUDA does
  return it;
}

// Streams of ours: high priority, and none of the callers'. One for each rank of a device where the
// caller named the algorithm, so that virtual ranks are as far apart as devices are.
CUDAStream lane(c10::DeviceIndex device, std::size_t number) {
  static std::mutex mutex;
  static auto& kept = *new std::map<c10::DeviceIndex, std::vector<CUDAStream>>;
  const std::lock_guard lock(mutex);
  auto& lanes = kept[device];
  while (lanes.size() <= number) lanes.push_back(c10::cuda::getStreamFromPool(true, device));
  return lanes[number];
}

// The streams that stand for the ranks' callers.
std::vector<CUDAStream> callers_of(const PreparedCall& job) {
  std::vector<CUDAStream> callers;
  c10::DeviceIndex first = -1;
  for (at::Device d : job.devices)
    if (first < 0 && !d.is_cpu()) first = d.index();
  for (std::size_t r = 0; r < job.devices.size(); ++r) {
    const auto device = job.devices[r].is_cpu() ? first : job.devices[r].index();
    const bool named = r < job.streams.size() && job.streams[r].has_value();
    callers.push_back(named ? CUDAStream(*job.streams[r])
                            : c10::cuda::getCurrentCUDAStream(device));
  }
  return callers;
}

bool all_alike(const PreparedCall& job, const std::vector<CUDAStream>& callers) {
  return std::all_of(job.devices.begin(), job.devices.end(),
                     [&](at::Device d) { return d == job.devices[0]; }) &&
         std::all_of(callers.begin(), callers.end(),
                     [&](const CUDAStream& s) { return s == callers[0]; });
}

// Lanes of a device, by what runs there: ranks first, then copies between the device and the host,
// the hub of many joins, and the stand-ins of callers who do not wait.
constexpr std::size_t kRankLanes = 16, kSender = kRankLanes, kReceiver = kSender + 1,
                      kHub = kReceiver + 1, kAside = kHub + 1;

cuda::CallStreams posts_of(const PreparedCall& job, const DtypePlan& part,
                           const std::vector<CUDAStream>& callers) {
  const bool on_the_spot = !part.named && job.peer_access && all_alike(job, callers);
  cuda::CallStreams streams_of_ranks;
  std::map<c10::DeviceIndex, std::size_t> used;
  for (std::size_t r = 0; r < job.devices.size(); ++r) {
    const auto device = callers[r].device_index();
    const std::size_t number = part.named ? used[device]++ % kRankLanes : 0;
    const cuda::Stream caller = plain(callers[r]);
    const auto ours = [&](std::size_t n) { return on_the_spot ? caller : plain(lane(device, n)); };
    streams_of_ranks.ranks.push_back({.device = job.devices[r].is_cpu() ? cuda::kHost : device,
                                      .caller = caller,
                                      .worker = ours(number),
                                      .sender = ours(kSender),
                                      .receiver = ours(kReceiver)});
  }
  if (!on_the_spot) streams_of_ranks.hub = plain(lane(callers[0].device_index(), kHub));
  return streams_of_ranks;
}

// Tells torch's allocator not to reuse the memory before the work on the stream has ended.
void keep_until_done(const at::Tensor& t, const cuda::Stream& s) {
  const CUDAStream stream = of_torch(s);
  if (t.is_cuda() && t.device().index() == s.device)
    c10::cuda::CUDACachingAllocator::recordStream(t.storage().data_ptr(), stream);
  else if (t.is_cpu() && t.is_pinned())
    at::getHostAllocator(at::kCUDA)->record_event(
        t.data_ptr(), t.storage().data_ptr().get_context(), stream.unwrap());
}
void keep_until_done(const PreparedCall& job, const cuda::CallStreams& streams_of_ranks) {
  for (const Tensors* list : {&job.held, &job.results})
    for (const at::Tensor& t : *list)
      for (const cuda::RankStreams& p : streams_of_ranks.ranks)
        for (const cuda::Stream& s : {p.worker, p.sender, p.receiver})
          if (t.numel() > 0 && !(s == p.caller)) keep_until_done(t, s);
}

bool is_captured(const CUDAStream& s) {
  const c10::cuda::CUDAGuard guard(s.device());
  return cuda_api().is_capturing(plain(s));
}

// Between unlike layouts torch copies, which waits for pageable memory where a capture forbids it.
void check_transposes(const PreparedCall& job) {
  for (const auto& [dst, src] : job.transposes)
    for (const at::Tensor* t : {&dst, &src})
      require(t->is_cuda() || t->numel() == 0 || t->is_pinned(), cuda::kPageableInCapture);
}

class GpuWork : public Work {
 public:
  GpuWork(PreparedCall job, std::vector<CUDAStream> buffers)
      : Work(job.results), job_(std::move(job)) {
    for (const CUDAStream& s : buffers) {
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
  std::exception_ptr exception() override {
    return nullptr;
  }  // what goes wrong is thrown at the call

 private:
  bool finished_within(double seconds);

  PreparedCall job_;
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

void issue(const PreparedCall& job, const std::vector<CUDAStream>& callers) {
  // In a capture the host does not wait: results in host memory are complete when a replay is.
  const bool captured = std::any_of(callers.begin(), callers.end(), is_captured);
  if (captured) check_transposes(job);
  for (const DtypePlan& p : job.parts) {
    cuda::CallStreams streams_of_ranks = posts_of(job, p, callers);
    streams_of_ranks.host_waits = !captured && std::any_of(job.devices.begin(), job.devices.end(),
                                                           [](at::Device d) { return d.is_cpu(); });
    keep_until_done(job, streams_of_ranks);
    executor().run({*p.compiled, p.bindings, p.dtype, p.op, p.options}, streams_of_ranks);
  }
  if (job.transposes.empty()) return;
  const c10::cuda::CUDAMultiStreamGuard as_the_callers(callers);
  for (const auto& [dst, src] : job.transposes) copy_strided(dst, src);
}

}  // namespace

bool has_cuda() { return true; }
bool serves(const at::Device& device) { return device.is_cpu() || device.is_cuda(); }

at::Tensor new_bytes_on_gpu(int64_t bytes, at::Device device) {
  return at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
}
at::Tensor new_pinned_bytes(int64_t bytes, at::Device device) {
  const c10::cuda::CUDAGuard guard(device);  // torch looks for a capture on its current stream
  return at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(true));
}

bool is_pageable(const void* address) { return !at::detail::getCUDAHooks().isPinnedPtr(address); }

void run_on_gpus(const PreparedCall& job) { issue(job, callers_of(job)); }

std::shared_ptr<Work> enqueue_on_gpus(PreparedCall job) {
  const ProfilerRange here(job.call);
  // Streams beside the callers' take their place, one for each, and only `wait` joins them again.
  std::vector<CUDAStream> callers = callers_of(job), buffers;
  for (CUDAStream& s : callers) {
    const CUDAStream side = lane(s.device_index(), kAside);
    c10::Event ready(at::kCUDA);
    ready.record(s.unwrap());
    ready.block(side.unwrap());
    s = side;
    if (std::find(buffers.begin(), buffers.end(), side) == buffers.end()) buffers.push_back(side);
  }
  for (const Tensors* list : {&job.held, &job.results})
    for (const at::Tensor& t : *list)
      if (t.is_cuda() && t.numel() > 0)
        c10::cuda::CUDACachingAllocator::recordStream(t.storage().data_ptr(),
                                                      lane(t.device().index(), kAside));
  issue(job, callers);
  return std::make_shared<GpuWork>(std::move(job), std::move(buffers));
}

}  // namespace pycollect
