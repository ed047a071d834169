// See executor.h. A run on one stream issues the plan's levels. A run on several numbers its
// streams, looks up the schedule and issues it. Copies between memories of different devices, or a
// device and the host, use a copy engine; folds and all other copies use kernels.
#include "executor.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "../plan/error.h"
#include "device_guard.h"
#include "kernel_launch.h"

namespace pycollect::cuda {
namespace {

// The cache is cleared when it has this many schedules: a training loop uses a handful, so most are
// no longer used by then.
constexpr std::size_t kMaxSchedules = 1024;

struct CallerStream {
  Stream stream;
  bool has_pinned;  // a rank that uses it as caller stream has pinned host memory
};
struct NumberedStreams {
  StreamMap at;
  std::vector<Stream> streams;
  std::vector<CallerStream> callers;  // distinct ones
};

// Returns true if the rank has an input or output with this value of BufferMemory::pageable.
bool has_memory(const BoundPlan& call, Rank r, bool pageable) {
  const auto fits = [&](const BufferMemory& m) {
    return m.base != nullptr && m.pageable == pageable;
  };
  return std::any_of(call.bindings.begin(), call.bindings.end(), [&](const Binding& b) {
    return fits(b.memory[r * kBuffers]) || fits(b.memory[r * kBuffers + 1]);
  });
}

// Returns true if all tasks of all ranks run on one stream of one device, whose order is the
// levels'.
bool on_one_stream(const CallStreams& streams_of_ranks) {
  const Stream first = streams_of_ranks.ranks[0].caller;
  return std::all_of(streams_of_ranks.ranks.begin(), streams_of_ranks.ranks.end(),
                     [&](const RankStreams& r) { return r == RankStreams{first.device, first}; });
}

NumberedStreams number_streams(const BoundPlan& call, const CallStreams& streams_of_ranks) {
  NumberedStreams result{{{}, 0}, {}, {}};
  auto number_of = [&](Stream s) {
    const auto known = std::find(result.streams.begin(), result.streams.end(), s);
    if (known != result.streams.end()) return static_cast<int>(known - result.streams.begin());
    result.streams.push_back(s);
    return static_cast<int>(result.streams.size()) - 1;
  };
  for (std::size_t r = 0; r < streams_of_ranks.ranks.size(); ++r) {
    const RankStreams& p = streams_of_ranks.ranks[r];
    result.at.stream_ids.push_back({number_of(p.caller), number_of(p.d2h), number_of(p.h2d)});
    auto& callers = result.callers;
    auto known = std::find_if(callers.begin(), callers.end(),
                              [&](const CallerStream& c) { return c.stream == p.caller; });
    if (known == callers.end()) known = callers.insert(callers.end(), {p.caller, false});
    known->has_pinned |= p.device == kHost && has_memory(call, static_cast<Rank>(r), false);
  }
  result.at.streams = static_cast<int>(result.streams.size());
  return result;
}

void check_capture(const BoundPlan& call, const CallStreams& streams_of_ranks) {
  if (streams_of_ranks.capture == 0) return;
  for (std::size_t r = 0; r < streams_of_ranks.ranks.size(); ++r)
    require(
        streams_of_ranks.ranks[r].device != kHost || !has_memory(call, static_cast<Rank>(r), true),
        "memory on the host that is not pinned cannot be read or written while a CUDA graph is "
        "captured; pin it with .pin_memory()");
}

}  // namespace

void check_call(const BoundPlan& call, const CallStreams& streams_of_ranks) {
  require_type(reduces(call.dtype, call.op), name(call.op), " is not defined for ",
               name(call.dtype));
  for (const Binding& binding : call.bindings) {
    const std::size_t most = most_addresses(binding.rows > 1);
    require(call.compiled.most_sources < most, "a GPU folds fewer than ", most,
            " sources at once; there are ", call.compiled.most_sources,
            "; use fewer, or in rank order name an algorithm that folds two at a time (\"chain\")");
  }
  check_capture(call, streams_of_ranks);
}

namespace {

class ExecutorRun {
 public:
  ExecutorRun(EventPool& events, PinnedRingPool& rings, const BoundPlan& call,
              const CallStreams& streams_of_ranks, DeviceGuard& device)
      : api_(events.api()),
        pool_(events),
        call_(call),
        streams_of_ranks_(streams_of_ranks),
        item_(item_bytes(call.dtype)),
        device_(device),
        ring_lease_(rings, device_) {
    const std::vector<RankStreams>& ranks = streams_of_ranks.ranks;
    if (!capturing() &&
        std::any_of(ranks.begin(), ranks.end(), [](auto& r) { return r.device == kHost; }))
      capture_mode_.emplace(api_);
  }

  // For ranks whose tasks are all on this stream.
  void run_levels(Stream stream) {
    device_.use(stream.device);
    for (const std::vector<TaskId>& level : call_.compiled.levels) issue_tasks(stream, level);
  }

  void run(NumberedStreams numbered, const Schedule& schedule) {
    numbered_ = std::move(numbered);
    touched_.resize(numbered_.streams.size());
    LaunchEvents events(schedule.size());
    try {
      for (std::size_t i = 0; i < schedule.size(); ++i) issue(schedule[i], events, i);
      ring_lease_.drain();
      if (!capturing()) synchronize_pinned();
    } catch (...) {
      join_callers();
      throw;
    }
  }

 private:
  using LaunchEvents = std::vector<std::optional<RecordedEvent>>;  // [scheduled launch]

  bool capturing() const { return streams_of_ranks_.capture != 0; }

  void issue(const ScheduledLaunch& scheduled, LaunchEvents& events, std::size_t number) {
    const Stream stream = numbered_.streams[scheduled.stream];
    device_.use(stream.device);
    touched_[scheduled.stream] = true;
    for (int e : scheduled.after) api_.wait(stream, events[e]->event());
    issue_tasks(stream, scheduled.tasks);
    if (scheduled.recorded) events[number].emplace(pool_, stream, capturing());
  }

  // Tasks of one level do not conflict: their kernel tasks on all bindings are one launch.
  void issue_tasks(Stream stream, const std::vector<TaskId>& tasks) {
    Launch launch{{}, call_.dtype, call_.op, call_.options};
    for (TaskId p : tasks) {
      const int step = call_.compiled.program[p.rank][p.index].step;
      if (step == kAllBuffers) continue;
      for (const Binding& binding : call_.bindings)
        if (elements(binding, call_.compiled.plan.steps[step]) > 0)
          issue_step(stream, binding, step, launch);
    }
    if (!launch.tasks.empty()) api_.launch(stream, launch);
  }

  // Issues one step on one binding, or adds it to `launch`.
  void issue_step(Stream stream, const Binding& binding, int index, Launch& launch) {
    const Step& step = call_.compiled.plan.steps[index];
    KernelTask kernel_task{{}, {}, {}, {}, binding.offsets.count(step.dsts[0]), binding.rows};
    kernel_task.finishes = call_.compiled.finishes[index];
    std::vector<bool> pageable;  // [pointer], destinations first
    for (const Slice& dst : step.dsts) {
      if (step.srcs.size() == 1 && try_copy(stream, binding, dst, step.srcs[0])) continue;
      std::byte* const to = address(binding, dst, item_);
      if (step.srcs.size() == 1 && to == address(binding, step.srcs[0], item_)) continue;
      kernel_task.dsts.push_back(to);
      kernel_task.dst_pitches.push_back(pitch(binding, dst));
      pageable.push_back(is_pageable(binding, dst));
    }
    if (kernel_task.dsts.empty()) return;
    for (const Slice& src : step.srcs) {
      kernel_task.srcs.push_back(address(binding, src, item_));
      kernel_task.src_pitches.push_back(pitch(binding, src));
      pageable.push_back(is_pageable(binding, src));
    }
    if (std::find(pageable.begin(), pageable.end(), true) == pageable.end())
      launch.tasks.push_back(std::move(kernel_task));
    else
      ring_lease_.launch(
          stream, {{std::move(kernel_task)}, launch.dtype, launch.op, launch.options}, pageable);
  }

  static bool is_pageable(const Binding& binding, const Slice& s) {
    return binding.memory[s.rank * kBuffers + static_cast<int>(s.buffer)].pageable;
  }
  Device memory_of(const Slice& s) const {
    return s.buffer == Buffer::host ? kHost : streams_of_ranks_.ranks[s.rank].device;
  }
  // Copies between two memories by a copy engine, or by the host if both are pageable. Returns
  // false if a kernel must copy: within the memory of a device, and on the host from or to pinned
  // memory, because a copy engine would make the host wait there.
  bool try_copy(Stream stream, const Binding& binding, const Slice& dst, const Slice& src) {
    const bool from_pageable = is_pageable(binding, src), to_pageable = is_pageable(binding, dst);
    const CopyRect r = rectangle(binding, dst, src);
    if (from_pageable && to_pageable) {
      if (r.dst != r.src) ring_lease_.copy_on_host(stream, r);
      return true;
    }
    if (memory_of(dst) == memory_of(src)) return false;
    if (from_pageable || to_pageable)
      ring_lease_.copy(stream, r);
    else
      api_.copy(stream, r);
    return true;
  }
  CopyRect rectangle(const Binding& binding, const Slice& dst, const Slice& src) const {
    return {.dst = address(binding, dst, item_),
            .src = address(binding, src, item_),
            .dst_pitch = pitch(binding, dst),
            .src_pitch = pitch(binding, src),
            .bytes = binding.offsets.count(dst) * item_,
            .rows = binding.rows,
            .dst_device = memory_of(dst),
            .src_device = memory_of(src)};
  }

  void synchronize_pinned() {
    for (const CallerStream& c : numbered_.callers) {
      if (!c.has_pinned) continue;
      device_.use(c.stream.device);
      api_.synchronize(c.stream);
    }
  }

  // Orders the caller streams behind all issued work, so that freeing or reusing the memory is
  // safe; the host, to which pinned memory belongs, waits for it. Drops errors, because the first
  // error is being thrown.
  void join_callers() noexcept {
    for (std::size_t i = 0; i < touched_.size(); ++i) {
      if (!touched_[i]) continue;
      try {
        const Stream from = numbered_.streams[i];
        device_.use(from.device);
        const RecordedEvent end(pool_, from, capturing());
        for (const CallerStream& c : numbered_.callers) {
          if (c.stream == from) continue;
          device_.use(c.stream.device);
          api_.wait(c.stream, end.event());
        }
      } catch (...) {
      }
    }
    try {
      if (!capturing()) synchronize_pinned();
    } catch (...) {
    }
  }

  Api& api_;
  EventPool& pool_;
  const BoundPlan& call_;
  const CallStreams& streams_of_ranks_;
  const std::size_t item_;
  std::optional<RelaxedCaptureMode> capture_mode_;  // if the host may wait for a stream
  DeviceGuard& device_;
  PinnedRingLease ring_lease_;
  // Of a run of a schedule:
  NumberedStreams numbered_ = {};
  std::vector<bool> touched_ = {};  // [stream]: work was issued on it
};

}  // namespace

uint64_t capture_of(Api& api, DeviceGuard& device, std::span<const Stream> callers) {
  std::size_t capturing = 0;
  uint64_t first = 0;
  for (const Stream& s : callers) {
    device.use(s.device);
    const uint64_t id = api.capture_id(s);
    if (id == 0) continue;
    ++capturing;
    if (first == 0) first = id;
    require(id == first,
            "the current streams of this call are in different captures of CUDA graphs");
  }
  require(capturing == 0 || capturing == callers.size(), "a CUDA graph is being captured on ",
          capturing, " of the ", callers.size(),
          " current streams of this call; capture on all of them, or on none");
  return first;
}

void Executor::enqueue(const BoundPlan& call, const CallStreams& streams_of_ranks,
                       DeviceGuard& device) {
  Device loaded = kHost;
  for (const RankStreams& r : streams_of_ranks.ranks)
    if (std::exchange(loaded, r.caller.device) != r.caller.device)
      events_.api().load(r.caller.device, call.dtype, call.op);
  ExecutorRun executor_run(events_, rings_, call, streams_of_ranks, device);
  if (on_one_stream(streams_of_ranks))
    return executor_run.run_levels(streams_of_ranks.ranks[0].caller);
  NumberedStreams numbered = number_streams(call, streams_of_ranks);
  const auto schedule = scheduled(call.compiled, numbered.at);
  executor_run.run(std::move(numbered), *schedule);
}

std::shared_ptr<const Schedule> Executor::scheduled(const CompiledPlan& compiled,
                                                    const StreamMap& at) {
  ScheduleKey key{compiled.id, at};
  {
    const std::lock_guard lock(mutex_);
    const auto known = schedules_.find(key);
    if (known != schedules_.end()) return known->second;
  }
  auto made = std::make_shared<const Schedule>(schedule(compiled, at));
  const std::lock_guard lock(mutex_);
  if (schedules_.size() >= kMaxSchedules) schedules_.clear();
  return schedules_.emplace(std::move(key), std::move(made)).first->second;
}

}  // namespace pycollect::cuda
