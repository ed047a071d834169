// See gpu_calls.h.
#include "gpu_calls.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "../plan/error.h"
#include "profiler.h"
#include "threads.h"

namespace pycollect {

InternalStreams::~InternalStreams() {
  for (const auto& [key, stream] : streams_) runtime_.give_back(stream);
}

cuda::Stream InternalStreams::stream(cuda::Device device, int number) {
  const std::lock_guard lock(mutex_);
  const auto known = streams_.find({device, number});
  if (known != streams_.end()) return known->second;
  const cuda::Stream made = runtime_.new_stream({kind_, static_cast<c10::DeviceIndex>(device)});
  streams_.emplace(std::pair(device, number), made);
  return made;
}

// Recorded and stored under one lock, so that the event stored last is the last of the stream.
std::shared_ptr<cuda::RecordedEvent> InternalStreams::record_async(cuda::EventPool& events,
                                                                   cuda::Device device,
                                                                   bool for_capture) {
  const cuda::Stream on = side(device);
  std::shared_ptr<cuda::RecordedEvent> former;  // given back without the lock
  const std::lock_guard lock(mutex_);
  auto end = std::make_shared<cuda::RecordedEvent>(events, on, for_capture);
  former = std::exchange(last_async_[device], end);
  return end;
}

std::shared_ptr<cuda::RecordedEvent> InternalStreams::last_async(cuda::Device device) const {
  const std::lock_guard lock(mutex_);
  const auto found = last_async_.find(device);
  return found == last_async_.end() ? nullptr : found->second;
}

using cuda::CaptureModeGuard;
using cuda::DeviceGuard;
using cuda::RankStreams;
using cuda::Stream;

namespace {

bool on_host(const at::Device& device) { return device.is_cpu(); }

// A copy between different layouts is torch's. In host memory the host waits for it, and between
// two GPUs it uses temporary memory that the graph does not keep.
void check_layout_copies(const ListCall& call) {
  for (const LayoutCopy& copy : call.layout_copies) {
    if (copy.dst.numel() == 0) continue;
    require(!copy.dst.is_cpu() && !copy.src.is_cpu(), call.name,
            ": a copy between different layouts cannot read or write host memory while a CUDA "
            "graph is captured; give all tensors the same layout");
    require(copy.dst.device() == copy.src.device(), call.name,
            ": a copy between different layouts on two GPUs cannot be captured in a CUDA graph; "
            "give both tensors the same layout");
  }
}

bool is_staged(const BoundPlan& plan) {
  const std::vector<bool>& staged = plan.compiled.staged;
  return std::find(staged.begin(), staged.end(), true) != staged.end();
}

std::vector<Stream> distinct_callers(const std::vector<RankStreams>& ranks) {
  std::vector<Stream> found;
  for (const RankStreams& r : ranks)
    if (std::find(found.begin(), found.end(), r.caller) == found.end()) found.push_back(r.caller);
  return found;
}

}  // namespace

GpuCalls::GpuCalls(std::shared_ptr<TorchRuntime> runtime, c10::DeviceType kind)
    : runtime_(std::move(runtime)),
      kind_(kind),
      api_(runtime_->cuda()),
      executor_(api_, runtime_->host_memory()),
      eager_(new CallResources{.streams{*runtime_, kind}}) {}

// Returns the streams of ranks that run all of their tasks on their caller's stream. A rank in host
// memory uses the first GPU of the call.
std::vector<RankStreams> GpuCalls::caller_streams(const ListCall& call) const {
  const auto first = std::find_if_not(call.devices.begin(), call.devices.end(), on_host);
  std::vector<RankStreams> ranks;
  for (std::size_t r = 0; r < call.devices.size(); ++r) {
    const at::Device device = on_host(call.devices[r]) ? *first : call.devices[r];
    const bool named = r < call.streams.size() && call.streams[r].has_value();
    const Stream caller =
        named ? runtime_->stream_of(*call.streams[r]) : runtime_->current_stream(device);
    ranks.push_back({on_host(call.devices[r]) ? cuda::kHost : caller.device, caller});
  }
  return ranks;
}

// Checks everything that may be refused, before any stream changes.
GpuCalls::EnqueueContext GpuCalls::context_of(DeviceGuard& device, const ListCall& call,
                                              bool is_async) {
  free_ended_graphs();
  EnqueueContext context;
  context.ranks = caller_streams(call);
  context.callers = distinct_callers(context.ranks);
  context.capture = cuda::capture_of(api_, device, context.callers);
  context.is_async = is_async;
  if (context.capture != 0) {
    check_layout_copies(call);
    context.keeps_memory =
        !runtime_->keeps_memory_of(context.capture) || is_multi_device(device, context);
  }
  context.producers = producers_of(device, call, context);
  for (const BoundPlan& plan : call.plans) cuda::check_call(plan, context);
  const Tensors kept = kept_by_graph(call, context);
  const bool staged = std::any_of(call.plans.begin(), call.plans.end(), is_staged);
  context.resources = resources_of(device, context, is_async || staged || !kept.empty());
  choose_streams(context, staged);
  if (!kept.empty()) {
    const std::lock_guard lock(mutex_);
    Tensors& all = context.resources->kept;
    all.insert(all.end(), kept.begin(), kept.end());
  }
  return context;
}

// Returns the resources of the calls in the capture, or outside of captures. Those of a capture are
// made only for a call that needs them; null: no call has.
std::shared_ptr<GpuCalls::CallResources> GpuCalls::resources_of(DeviceGuard& device,
                                                                const EnqueueContext& context,
                                                                bool needed) {
  const uint64_t capture = context.capture;
  if (capture == 0) return eager_;
  {
    const std::lock_guard lock(mutex_);
    const auto known = graphs_.find(capture);
    if (known != graphs_.end()) return known->second;
  }
  if (!needed) return nullptr;
  device.use(context.callers[0].device);
  api_.at_graph_end(context.callers[0], [self = shared_from_this(), capture] {
    const std::lock_guard lock(self->mutex_);
    self->ended_graphs_.insert(self->graphs_.extract(capture));
  });
  const std::shared_ptr<CallResources> made(new CallResources{.streams{*runtime_, kind_}});
  const std::lock_guard lock(mutex_);
  return graphs_.emplace(capture, made).first->second;  // another thread may have made them
}

void GpuCalls::free_ended_graphs() {
  ResourcesByCapture freed;  // without the lock
  const std::lock_guard lock(mutex_);
  freed.swap(ended_graphs_);
}

// Returns the streams of the owners of memory that are to be ordered with the call, besides the
// callers' streams. A replay is ordered only by the stream that replays the graph, so a capture
// leaves out streams outside of it.
std::vector<Stream> GpuCalls::producers_of(DeviceGuard& device, const ListCall& call,
                                           const EnqueueContext& context) const {
  std::vector<Stream> found;
  for (const Stream& s : call.producers) {
    device.use(s.device);
    const uint64_t theirs = api_.capture_id(s);
    require(theirs == context.capture || theirs == 0, call.name,
            ": the stream of an array's library is in the capture of a CUDA graph, and the streams "
            "of this call are not; capture on all of them, or on none");
    const std::vector<Stream>& callers = context.callers;
    if (theirs == context.capture && std::find(callers.begin(), callers.end(), s) == callers.end())
      found.push_back(s);
  }
  return found;
}

// Returns whether the capture is on several devices, as far as can be seen: on which of them it has
// begun cannot. A default stream is never captured, and its device may not be in use.
bool GpuCalls::is_multi_device(DeviceGuard& device, const EnqueueContext& context) const {
  const cuda::Device first = context.callers[0].device;
  for (const Stream& s : context.callers)
    if (s.device != first) return true;
  for (cuda::Device d = 0; d < runtime_->devices(); ++d) {
    const Stream s = runtime_->current_stream({kind_, static_cast<c10::DeviceIndex>(d)});
    if (d == first || s.handle == nullptr) continue;
    device.use(d);
    if (api_.capture_id(s) == context.capture) return true;
  }
  return false;
}

// A rank's work is on its caller's stream, or on a side stream. Only copies through the host have
// streams of their own, one for each direction, so that they overlap with each other and with
// folds.
void GpuCalls::choose_streams(EnqueueContext& context, bool staged) {
  for (RankStreams& r : context.ranks) {
    const cuda::Device on = r.caller.device;
    if (context.is_async) r.caller = context.internal().side(on);
    r.d2h = staged ? context.internal().d2h(on) : r.caller;
    r.h2d = staged ? context.internal().h2d(on) : r.caller;
  }
  context.distinct = context.is_async ? distinct_callers(context.ranks) : context.callers;
}

// Pinned memory of the call itself is not reused before the callers' streams, which wait for all
// other streams, are done with it. Device memory needs no such mark: it was allocated for them.
void GpuCalls::enqueue_parts(DeviceGuard& device, const ListCall& call,
                             const EnqueueContext& context) {
  if (context.capture == 0)
    for (const at::Tensor& t : call.scratch)
      if (t.is_cpu())
        for (const Stream& s : context.distinct) runtime_->record_stream(t, s);
  if (!call.layout_copies.empty()) enqueue_layout_copies(device, call, context);
  for (const BoundPlan& plan : call.plans) executor_.enqueue(plan, context, device);
}

// Torch copies on the current streams of both devices. Between two tensors in host memory the host
// copies, when the work on the rank's stream is done, because that may access them.
void GpuCalls::enqueue_layout_copies(DeviceGuard& device, const ListCall& call,
                                     const EnqueueContext& context) const {
  const cuda::RelaxedCaptureMode mode(api_);
  for (const LayoutCopy& copy : call.layout_copies) {
    const Stream own = context.ranks[copy.rank].caller;
    if (copy.dst.is_cpu() && copy.src.is_cpu()) {
      device.use(own.device);
      api_.synchronize(own);
    }
    std::vector<Stream> streams{own};
    for (const Stream& s : context.distinct)
      if (std::none_of(streams.begin(), streams.end(),
                       [&](const Stream& known) { return known.device == s.device; }))
        streams.push_back(s);
    runtime_->with_streams(streams, [&] { copy_strided(copy.dst, copy.src); });
  }
}

// Torch keeps memory in the graph's pool that is allocated during its own captures, but only on the
// device on which the capture has begun. All other memory of the call, and pinned memory in any
// case, must live as long as the graph. What the caller passes in is the caller's to keep, but
// after an asynchronous call not before its end, of which no allocator knows.
Tensors GpuCalls::kept_by_graph(const ListCall& call, const EnqueueContext& context) {
  Tensors kept;
  if (context.capture == 0) return kept;
  const auto keep = [&](const Tensors& list) {
    for (const at::Tensor& t : list)
      if (context.keeps_memory || t.is_cpu()) kept.push_back(t);
  };
  keep(call.scratch);
  if (context.keeps_memory) keep(call.results);
  if (context.keeps_memory && context.is_async) keep(call.written), keep(call.held);
  return kept;
}

// One event for each earlier stream that a later one has to wait for.
void GpuCalls::order(DeviceGuard& device, const std::vector<Stream>& earlier,
                     const std::vector<Stream>& later, uint64_t capture) {
  for (const Stream& from : earlier) {
    std::optional<cuda::RecordedEvent> end;
    for (const Stream& to : later) {
      if (to == from || to.device != from.device) continue;
      device.use(from.device);
      if (!end) end.emplace(executor_.events(), from, capture != 0);
      api_.wait(to, end->event());
    }
  }
}

// Orders the streams of the caller and of producers behind work that is enqueued already. Drops
// errors, because the first error is being thrown.
void GpuCalls::order_after_failure(DeviceGuard& device, const EnqueueContext& context) noexcept {
  for (const std::vector<Stream>* later : {&context.callers, &context.producers}) try {
      order(device, context.distinct, *later, context.capture);
    } catch (...) {
    }
}

void GpuCalls::run(const ListCall& call) {
  DeviceGuard device(api_);
  const EnqueueContext context = context_of(device, call, false);
  order(device, context.producers, context.distinct, context.capture);
  for (const Stream& s : context.distinct) {
    const auto end = context.resources ? context.internal().last_async(s.device) : nullptr;
    if (end == nullptr) continue;
    device.use(s.device);
    api_.wait(s, end->event());
  }
  try {
    enqueue_parts(device, call, context);
    order(device, context.distinct, context.producers, context.capture);
  } catch (...) {  // work may be enqueued already
    order_after_failure(device, context);
    throw;
  }
}

std::shared_ptr<Work> GpuCalls::enqueue(ListCall call) {
  const ProfilerRange range(call.name);
  DeviceGuard device(api_);
  const EnqueueContext context = context_of(device, call, true);
  order(device, context.producers, context.distinct, context.capture);
  order(device, context.callers, context.distinct, context.capture);
  const bool owned = record_side_streams(call, context);
  std::vector<std::shared_ptr<cuda::RecordedEvent>> ends;
  try {
    enqueue_parts(device, call, context);
    for (const Stream& s : context.distinct) {
      device.use(s.device);
      ends.push_back(
          context.internal().record_async(executor_.events(), s.device, context.capture != 0));
    }
    // Now, because the owner of the memory may destroy its stream before wait().
    order(device, context.distinct, context.producers, context.capture);
  } catch (...) {  // no work is returned that would make these streams wait
    order_after_failure(device, context);
    throw;
  }
  return std::make_shared<GpuWork>(shared_from_this(), std::move(call), std::move(ends),
                                   context.capture, owned);
}

// Returns whether torch's allocator owns all device memory of the call. The allocator must not
// record streams of a capture of which it does not know; the graph keeps the memory then.
bool GpuCalls::record_side_streams(const ListCall& call, const EnqueueContext& context) const {
  if (context.keeps_memory) return true;
  bool owned = true;
  for (const Tensors* list : {&call.written, &call.held, &call.scratch, &call.results})
    for (const at::Tensor& t : *list)
      if (!t.is_cpu() && t.numel() > 0)
        owned &= runtime_->record_stream(t, context.internal().side(t.device().index()));
  return owned;
}

GpuWork::GpuWork(std::shared_ptr<GpuCalls> calls, ListCall call,
                 std::vector<std::shared_ptr<cuda::RecordedEvent>> ends, uint64_t capture,
                 bool owned)
    : Work(call.results),
      calls_(std::move(calls)),
      ends_(std::move(ends)),
      capture_(capture),
      owned_(owned),
      call_(std::move(call)) {}

// Memory of other allocators may be reused on the current streams once its tensors are released.
GpuWork::~GpuWork() {
  try {
    if (owned_ || waited_) return;
    const std::vector<cuda::Stream> streams = current_streams();
    if (capture_of(streams) == capture_)
      order(streams);
    else  // the current streams cannot wait, so the memory is never reused
      static_cast<void>(new ListCall(std::move(call_)));
  } catch (...) {  // the device is broken
  }
}

std::vector<cuda::Stream> GpuWork::current_streams() const {
  std::vector<cuda::Stream> streams;
  for (const auto& end : ends_)
    streams.push_back(calls_->runtime().current_stream(
        {calls_->kind_, static_cast<c10::DeviceIndex>(end->event().device)}));
  return streams;
}

uint64_t GpuWork::capture_of(const std::vector<cuda::Stream>& streams) const {
  cuda::DeviceGuard device(calls_->api_);
  return cuda::capture_of(calls_->api_, device, streams);
}

void GpuWork::order(const std::vector<cuda::Stream>& streams) {
  cuda::DeviceGuard device(calls_->api_);
  for (std::size_t i = 0; i < streams.size(); ++i) {
    device.use(streams[i].device);
    calls_->api_.wait(streams[i], ends_[i]->event());
  }
}

// Tensors are released at once: their memory is not reused before the side streams are done with
// it.
bool GpuWork::wait(std::optional<double> seconds) {
  require(!seconds || capture_ == 0,
          "wait: the host cannot wait for a collective while a CUDA graph is captured; pass no "
          "timeout");
  const std::vector<cuda::Stream> streams = current_streams();
  const uint64_t capture = capture_of(streams);
  require(capture == capture_ || capture == 0,
          "wait: the collective is not in the capture of a CUDA graph that is in progress; call "
          "wait() before the capture begins");
  require(capture == capture_,
          "wait: the collective is in the capture of a CUDA graph, and the current stream is not; "
          "call wait() during the capture, on one of its streams");
  if (seconds && !finished_within(*seconds)) return false;
  order(streams);
  ListCall done;  // released without the lock
  const std::lock_guard lock(mutex_);
  waited_ = true;
  std::swap(done, call_);
  return true;
}

bool GpuWork::is_completed() {
  if (capture_ != 0) return false;
  return std::all_of(ends_.begin(), ends_.end(), [&](const auto& end) {
    const CaptureModeGuard guard(calls_->api_, end->event().device);
    return calls_->api_.query(end->event());
  });
}

bool GpuWork::finished_within(double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!is_completed()) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

}  // namespace pycollect
