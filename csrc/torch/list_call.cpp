// See list_call.h.
#include "list_call.h"

#include <ATen/EmptyTensor.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <future>
#include <mutex>
#include <thread>

#include "../plan/error.h"
#include "gpus.h"
#include "log.h"
#include "profiler.h"
#include "threads.h"

namespace pycollect {
namespace {

void log_choice(const SelectionKey& key, const Choice& choice) {
  log_once(text(name(key.collective), " of ", key.bytes, " bytes of ", name(key.dtype), " on ",
                key.world, " ranks", key.order == FoldOrder::tree ? " in tree order" : "", ": ",
                choice.algorithm->name, " (", choice.reason, ")"));
}

// Allocates bytes on the device. On the host it bypasses the dispatcher, whose modes may substitute
// a tensor without memory.
at::Tensor new_bytes(int64_t bytes, at::Device device) {
  if (device.is_cpu()) return at::Tensor(at::detail::empty_cpu({bytes}, at::kByte));
  return new_bytes_on_gpu(bytes, device);
}

}  // namespace

at::Device ListCall::first_gpu() const {
  return *std::find_if(devices.begin(), devices.end(), [](at::Device d) { return !d.is_cpu(); });
}

BoundPlan ListCall::make_plan(SelectionKey key, std::string_view algorithm, Rank root,
                              ReduceOp op) const {
  const bool gpus = on_gpus();
  if (gpus) key.topology = topology_of(devices, peer_access);
  const Choice choice = choose(key, algorithm, is_logging());
  if (is_logging()) log_choice(key, choice);
  PlanKey plan{choice.algorithm, key.world, root, choice.pieces, key.in_place};
  if (gpus && key.topology == Topology::staged) plan.reach = memory_reach_of(devices, peer_access);
  FoldOptions options{.world = key.world, .non_temporal = !key.in_place, .order = key.order};
  if (item_bytes(key.dtype) == 1) options.float8 = float8_specials();
  return {compiled(plan), key.dtype, op, options};
}

void ListCall::bind(BoundPlan& plan, PlanOffsets offsets, std::vector<BufferMemory> memory,
                    std::size_t rows) {
  Binding binding{std::move(offsets), std::move(memory), rows};
  if (plan.compiled.needs_memory) allocate(plan, binding);
  if (on_gpus() && on_host()) find_pageable(binding);
  plan.bindings.push_back(std::move(binding));
}

// Allocates scratch and host memory for the ranks where the plan uses it.
void ListCall::allocate(const BoundPlan& plan, Binding& binding) {
  const bool gpus = on_gpus();
  const auto add = [&](Rank r, Buffer buffer, bool pinned) {
    const std::size_t bytes = binding.offsets.total(r, buffer) * item_bytes(plan.dtype);
    const std::size_t pitch = (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
    const auto all = static_cast<int64_t>(pitch * binding.rows);
    const at::Device gpu = pinned && devices[r].is_cpu() ? first_gpu() : devices[r];
    on_stream_of(streams, r, [&] {
      scratch.push_back(pinned ? new_pinned_bytes(all, gpu) : new_bytes(all, devices[r]));
    });
    binding.memory[r * kBuffers + static_cast<int>(buffer)] = {
        static_cast<std::byte*>(scratch.back().mutable_data_ptr()),
        static_cast<std::ptrdiff_t>(pitch)};
  };
  for (Rank r = 0; r < plan.compiled.plan.world; ++r) {
    const bool gpus_access_host = gpus && devices[r].is_cpu();
    if (plan.compiled.scratched[r]) add(r, Buffer::scratch, gpus_access_host);
    if (plan.compiled.staged[r]) add(r, Buffer::host, true);
  }
}

// Marks the inputs and outputs of ranks on the host that no GPU should touch.
void ListCall::find_pageable(Binding& binding) const {
  for (std::size_t r = 0; r < devices.size(); ++r)
    for (const Buffer b : {Buffer::input, Buffer::output}) {
      BufferMemory& m = binding.memory[r * kBuffers + static_cast<int>(b)];
      if (devices[r].is_cpu() && m.base != nullptr)
        m.pageable = gpu_calls(first_gpu().type()).runtime().is_pageable(m.base);
    }
}

void ListCall::replace(at::Tensor& input, at::Tensor copy, Rank rank) {
  check_tensor(copy, AccessMode::write, {name, "a copy of an input"});
  scratch.push_back(copy);
  layout_copies.push_back({copy, input.detach(), rank});
  input = std::move(copy);
}

void ListCall::commit() const {
  for (const at::Tensor& t : written)
    if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
}

void ListCall::run() const {
  const ProfilerRange range(name);
  if (on_gpus()) return gpu_calls(first_gpu().type()).run(*this);
  run(threads());
}

void ListCall::run(const cpu::ParallelFor& parallel_for) const {
  for (const LayoutCopy& copy : layout_copies) copy_strided(copy.dst, copy.src);
  for (const BoundPlan& plan : plans) cpu::run(plan, parallel_for);
}

void add(DtypeGroups& groups, DType dtype, std::size_t index, std::size_t bytes) {
  auto* group = std::find_if(groups.begin(), groups.end(),
                             [&](const DtypeGroup& g) { return g.dtype == dtype; });
  if (group == groups.end()) group = &groups.emplace_back(DtypeGroup{dtype});
  group->bytes += bytes;
  group->indices.push_back(index);
}

namespace {

class QueuedWork : public Work {
 public:
  explicit QueuedWork(ListCall call) : Work(call.results), call_(std::move(call)) {
    if (CallerProfile::is_active()) caller_.emplace();
  }

  bool wait(std::optional<double> seconds) override {
    if (seconds && !is_completed_within(*seconds)) return false;
    done_.get();
    return true;
  }
  bool is_completed() override { return is_completed_within(0); }
  std::exception_ptr exception() override {
    try {
      if (is_completed()) done_.get();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  void run() noexcept {
    std::exception_ptr error;
    try {
      const ProfilerRange range(call_.name, caller_);
      call_.run(threads());
    } catch (...) {
      error = std::current_exception();
    }
    call_ = ListCall{.name = call_.name};
    error ? ended_.set_exception(error) : ended_.set_value();
  }

 private:
  bool is_completed_within(double seconds) const {
    return done_.wait_for(std::chrono::duration<double>(seconds)) == std::future_status::ready;
  }

  ListCall call_;
  std::optional<CallerProfile> caller_;  // none: no profiler
  std::promise<void> ended_;
  const std::shared_future<void> done_ = ended_.get_future();
};

class WorkQueue {
 public:
  WorkQueue() {
    std::thread thread([this] { serve(); });
    thread_id_ = thread.get_id();
    thread.detach();
  }

  void push(std::shared_ptr<QueuedWork> work) {
    {
      const std::lock_guard lock(mutex_);
      queued_.push_back(std::move(work));
      unfinished_.fetch_add(1, std::memory_order_relaxed);  // before the call can run
    }
    changed_.notify_all();
  }

  bool busy() const { return unfinished_.load(std::memory_order_acquire) != 0; }

  void drain() {
    if (!busy() || std::this_thread::get_id() == thread_id_) return;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !busy(); });
  }

 private:
  void serve() {
    for (std::unique_lock lock(mutex_);;) {
      changed_.wait(lock, [&] { return !queued_.empty(); });
      std::shared_ptr<QueuedWork> work = std::move(queued_.front());
      queued_.pop_front();
      lock.unlock();
      work->run();
      work.reset();  // frees its tensors before drain() returns
      lock.lock();
      unfinished_.fetch_sub(1, std::memory_order_release);
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<QueuedWork>> queued_;
  std::atomic<int> unfinished_{0};  // calls that are queued or running
  std::thread::id thread_id_;
};

// The queue of host calls. It is never destroyed, because its thread may outlive main. A forked
// child has no such thread and creates its own queue.
std::atomic<WorkQueue*> queue_{nullptr};
std::mutex creation_mutex_;
[[maybe_unused]] const int fork_handlers_registered =
    pthread_atfork([] { creation_mutex_.lock(); }, [] { creation_mutex_.unlock(); },
                   [] {
                     queue_ = nullptr;
                     creation_mutex_.unlock();
                   });

WorkQueue& queue() {
  const std::lock_guard lock(creation_mutex_);
  if (queue_ == nullptr) queue_ = new WorkQueue;
  return *queue_;
}

}  // namespace

std::shared_ptr<Work> enqueue(ListCall call) {
  if (call.on_gpus()) {
    GpuCalls& calls = gpu_calls(call.first_gpu().type());
    return calls.enqueue(std::move(call));
  }
  auto work = std::make_shared<QueuedWork>(std::move(call));
  queue().push(work);
  return work;
}

bool busy() {
  const WorkQueue* q = queue_.load(std::memory_order_acquire);
  return q != nullptr && q->busy();
}

void drain() {
  if (WorkQueue* q = queue_.load(std::memory_order_acquire)) q->drain();
}

}  // namespace pycollect
