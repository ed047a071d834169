#include "gpu_calls.h"

#include <algorithm>

#include "../plan/error.h"
#include "gpu_work.h"
#include "profiler_range.h"
#include "threads.h"

namespace pycollect {

using cuda::DeviceGuard;
using cuda::Stream;

namespace {

bool on_host(const at::Device& device) { return device.is_cpu(); }

// A copy between different layouts in host memory is torch's, which waits for the device.
void check_transposes(const PreparedCall& prepared) {
  for (const auto& [dst, src] : prepared.transposes)
    for (const at::Tensor* t : {&dst, &src})
      require(
          !t->is_cpu() || t->numel() == 0,
          "a copy between different layouts cannot read or write host memory while a CUDA graph "
          "is captured; give both tensors the same layout");
}

std::vector<Stream> distinct(const std::vector<Stream>& streams) {
  std::vector<Stream> found;
  for (const Stream& s : streams)
    if (std::find(found.begin(), found.end(), s) == found.end()) found.push_back(s);
  return found;
}

}  // namespace

GpuCalls::GpuCalls(std::shared_ptr<TorchRuntime> runtime, c10::DeviceType kind)
    : runtime_(std::move(runtime)),
      kind_(kind),
      api_(runtime_->cuda()),
      executor_(api_, runtime_->host_memory()),
      sets_(*runtime_, kind) {}

GpuCalls::~GpuCalls() { free_graph_memory(); }

// Returns each rank's caller stream. A rank in host memory uses the first GPU of the call.
std::vector<Stream> GpuCalls::callers_of(const PreparedCall& prepared) const {
  const auto first = std::find_if_not(prepared.devices.begin(), prepared.devices.end(), on_host);
  std::vector<Stream> callers;
  for (std::size_t r = 0; r < prepared.devices.size(); ++r) {
    const at::Device device = on_host(prepared.devices[r]) ? *first : prepared.devices[r];
    const bool named = r < prepared.streams.size() && prepared.streams[r].has_value();
    callers.push_back(named ? runtime_->stream_of(*prepared.streams[r])
                            : runtime_->current_stream(device));
  }
  return callers;
}

// Checks everything that may be refused, before any stream changes.
GpuCalls::Issue GpuCalls::issue_of(DeviceGuard& device, const PreparedCall& prepared) {
  free_graph_memory();
  Issue issue{callers_of(prepared), {}, 0, {}};
  issue.distinct = distinct(issue.callers);
  issue.capture = cuda::capture_of(api_, device, issue.distinct);
  if (issue.capture != 0) check_transposes(prepared);
  issue.internal = sets_.of(issue.capture);
  return issue;
}

// Chooses the streams of each part. One device and one caller's stream need no other streams, so a
// level is one launch, without events. If the caller named the algorithm, each rank of a device has
// its own worker stream, so that virtual ranks run as independently as ranks on different devices.
void GpuCalls::prepare_parts(const PreparedCall& prepared, Issue& issue) const {
  const std::vector<at::Device>& devices = prepared.devices;
  const bool is_simple =
      prepared.peer_access && issue.distinct.size() == 1 &&
      std::all_of(devices.begin(), devices.end(), [&](at::Device d) { return d == devices[0]; });
  const bool any_on_host = std::any_of(devices.begin(), devices.end(), on_host);
  for (const DtypePlan& part : prepared.parts) {
    // During a capture the host does not wait: results in host memory are complete after a replay.
    cuda::CallStreams streams{
        .ranks = {}, .host_waits = issue.capture == 0 && any_on_host, .capture = issue.capture};
    const bool on_caller_stream = !part.named && is_simple;
    issue.uses_internal |= !on_caller_stream;
    InternalStreams& internal = *issue.internal;
    std::map<cuda::Device, std::size_t> ranks_on;
    for (std::size_t r = 0; r < devices.size(); ++r) {
      const Stream caller = issue.callers[r];
      const cuda::Device on = caller.device;
      cuda::RankStreams rank{on_host(devices[r]) ? cuda::kHost : on, caller, caller};
      if (!on_caller_stream)
        rank = {rank.device, caller, internal.worker(on, part.named ? ranks_on[on]++ : 0),
                internal.d2h(on), internal.h2d(on)};
      streams.ranks.push_back(rank);
    }
    if (!on_caller_stream) streams.join_stream = internal.join(issue.callers[0].device);
    cuda::check_call({*part.compiled, part.bindings, part.dtype, part.op, part.options}, streams);
    issue.parts.push_back(std::move(streams));
  }
}

// Pinned memory of the call itself is not reused before the callers' streams, which wait for all
// other streams, are done with it. Device memory needs no such mark: it was allocated for them.
void GpuCalls::enqueue_parts(DeviceGuard& device, const PreparedCall& prepared,
                             const Issue& issue) {
  if (issue.capture == 0)
    for (const at::Tensor& t : prepared.scratch)
      if (t.is_cpu())
        for (const Stream& s : issue.distinct) runtime_->record_stream(t, s);
  for (std::size_t i = 0; i < prepared.parts.size(); ++i) {
    const DtypePlan& part = prepared.parts[i];
    executor_.run({*part.compiled, part.bindings, part.dtype, part.op, part.options},
                  issue.parts[i], device);
  }
  if (prepared.transposes.empty()) return;
  const cuda::ThreadCaptureMode mode(api_);
  runtime_->with_streams(issue.distinct, [&] {
    for (const auto& [dst, src] : prepared.transposes) copy_strided(dst, src);
  });
}

// Torch returns memory of a capture to the graph's pool, but only on the device that began the
// capture. All other memory must live as long as the graph; what else the caller passes in is kept
// by the caller.
void GpuCalls::keep_for_graph(DeviceGuard& device, const PreparedCall& prepared,
                              const Issue& issue) {
  if (issue.capture == 0) return;
  auto memory = std::make_unique<GraphMemory>();
  memory->tensors = prepared.scratch;
  const auto is_elsewhere = [&](const Stream& s) { return s.device != device.former(); };
  if (std::any_of(issue.distinct.begin(), issue.distinct.end(), is_elsewhere))
    memory->tensors.insert(memory->tensors.end(), prepared.results.begin(), prepared.results.end());
  if (issue.uses_internal && StreamSets::must_keep(*issue.internal))
    memory->streams = issue.internal;
  if (memory->tensors.empty() && memory->streams == nullptr) return;
  device.use(issue.distinct[0].device);
  api_.at_graph_end(issue.distinct[0], [self = shared_from_this(), m = memory.get()] {
    m->streams.reset();
    m->next = self->unused_graph_memory_.load();
    while (!self->unused_graph_memory_.compare_exchange_weak(m->next, m)) {
    }
  });
  static_cast<void>(memory.release());  // the graph owns it now
}

void GpuCalls::free_graph_memory() {
  if (unused_graph_memory_.load(std::memory_order_relaxed) == nullptr) return;
  for (GraphMemory* m = unused_graph_memory_.exchange(nullptr); m != nullptr;) {
    const std::unique_ptr<GraphMemory> freed(m);
    m = m->next;
  }
}

void GpuCalls::order(DeviceGuard& device, Stream earlier, std::span<const Stream> later,
                     uint64_t capture) {
  device.use(earlier.device);
  const cuda::SharedEvent end(executor_.events(), earlier, capture != 0);
  for (const Stream& s : later) {
    if (s == earlier) continue;
    device.use(s.device);
    api_.wait(s, end.event());
  }
}

namespace {

// The streams of `all` that are on the device.
std::vector<Stream> on_device(const std::vector<Stream>& all, cuda::Device device) {
  std::vector<Stream> found;
  for (const Stream& s : all)
    if (s.device == device) found.push_back(s);
  return found;
}

}  // namespace

// A replay of a graph is ordered only by the stream that replays it, so a capture leaves out the
// streams of other libraries.
void GpuCalls::order_after_producers(DeviceGuard& device, const PreparedCall& prepared,
                                     const Issue& issue) {
  if (issue.capture != 0) return;
  for (const Stream& producer : prepared.producers)
    order(device, producer, on_device(issue.distinct, producer.device), 0);
}

void GpuCalls::order_producers_after(DeviceGuard& device, const PreparedCall& prepared,
                                     const Issue& issue) {
  if (issue.capture != 0) return;
  for (const Stream& producer : prepared.producers)
    for (const Stream& caller : on_device(issue.distinct, producer.device))
      order(device, caller, {&producer, 1}, 0);
}

void GpuCalls::run(const PreparedCall& prepared) {
  DeviceGuard device(api_);
  Issue issue = issue_of(device, prepared);
  prepare_parts(prepared, issue);
  order_after_producers(device, prepared, issue);
  for (const Stream& s : issue.distinct)
    if (const auto end = issue.internal->last_async(s.device)) {
      device.use(s.device);
      api_.wait(s, end->event());
    }
  enqueue_parts(device, prepared, issue);
  order_producers_after(device, prepared, issue);
  keep_for_graph(device, prepared, issue);
}

std::shared_ptr<Work> GpuCalls::enqueue(PreparedCall prepared) {
  const ProfilerRange range(prepared.call);
  DeviceGuard device(api_);
  Issue issue = issue_of(device, prepared);
  const std::vector<Stream> requested_on = std::exchange(issue.distinct, {});
  for (Stream& s : issue.callers) s = issue.internal->side(s.device);
  issue.distinct = distinct(issue.callers);
  issue.uses_internal = true;
  prepare_parts(prepared, issue);
  Issue callers{requested_on, requested_on, issue.capture, issue.internal};
  order_after_producers(device, prepared, callers);
  for (const Stream& s : requested_on)
    order(device, s, on_device(issue.distinct, s.device), issue.capture);
  bool owned = true;  // by torch's allocator
  for (const Tensors* list : {&prepared.held, &prepared.scratch, &prepared.results})
    for (const at::Tensor& t : *list)
      if (!t.is_cpu() && t.numel() > 0)
        owned &= runtime_->record_stream(t, issue.internal->side(t.device().index()));
  std::vector<std::shared_ptr<cuda::SharedEvent>> ends;
  try {
    enqueue_parts(device, prepared, issue);
    keep_for_graph(device, prepared, issue);
    for (const Stream& s : issue.distinct) {
      device.use(s.device);
      ends.push_back(
          std::make_shared<cuda::SharedEvent>(executor_.events(), s, issue.capture != 0));
      issue.internal->set_last_async(s.device, ends.back());
    }
  } catch (...) {  // no work is returned that would make these streams wait
    for (const Stream& s : issue.distinct)
      order(device, s, on_device(requested_on, s.device), issue.capture);
    throw;
  }
  return std::make_shared<GpuWork>(shared_from_this(), std::move(prepared), std::move(ends),
                                   issue.capture != 0, owned);
}

}  // namespace pycollect
