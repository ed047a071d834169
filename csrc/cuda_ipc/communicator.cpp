#include "communicator.h"

#include <thread>

namespace pycollect::cuda_ipc {
namespace {

// Time for a stream to end on which no work of a call is pending, and the interval of queries.
constexpr std::chrono::seconds kStreamTimeout{5};
constexpr std::chrono::microseconds kPollInterval{50};

// Ranks that must act before `r` enqueues its signal: `r` itself if it is gone, otherwise the ranks
// furthest behind, because the others may only be waiting for them.
std::vector<Rank> missing(const ipc::Group& group, const SignalPad& signal_pad, Rank r) {
  if ((group.gone() >> r & 1) != 0) return {r};
  std::vector<Rank> last;
  uint64_t least = 0;
  for (Rank other = 0; other < group.world(); ++other) {
    const uint64_t seen = signal_pad.entry(other).enqueued.load(std::memory_order_acquire);
    if (other == group.rank() || (!last.empty() && seen != least && ipc::reached(seen, least)))
      continue;
    if (seen != least) last.clear();
    least = seen;
    last.push_back(other);
  }
  return last;
}

}  // namespace

RegisteredHostMemory::~RegisteredHostMemory() {
  if (abandoned_) return;
  try {
    gpu_.unregister_host(device_, host_);
  } catch (...) {  // the device is broken
    leak(segment_);
  }
}

CudaIpcCommunicator::CudaIpcCommunicator(Resources resources)
    : resources_(std::move(resources)), awaited_(resources_.group->world()) {}

CudaIpcCommunicator::~CudaIpcCommunicator() = default;

void CudaIpcCommunicator::signal(uint64_t value) {
  gpu().on(stream().device,
           [&](cuda::Api& api) { api.write_value(stream(), word(group().rank()), value); });
  resources_.signal_pad.entry(group().rank()).enqueued.store(value, std::memory_order_release);
}

void CudaIpcCommunicator::wait(Rank r, uint64_t value, const ipc::OpContext& context) {
  const std::atomic<uint64_t>& enqueued = resources_.signal_pad.entry(r).enqueued;
  const auto ready = [&] { return ipc::reached(enqueued.load(std::memory_order_acquire), value); };
  if (!ready())
    group().await(ready, {.missing = [&] { return missing(group(), resources_.signal_pad, r); }},
                  context);
  if (ipc::reached(awaited_[r], value)) return;  // counters only grow
  if (!work_) begin_work(context);
  work_->add_wait(r, value);  // from now on, enqueueing may block until the peer signals
  gpu().on(stream().device, [&](cuda::Api& api) { api.wait_value(stream(), word(r), value); });
  awaited_[r] = value;
}

// A stream released by an abort also reaches its end, without results and perhaps before this rank
// has noticed the abort. Such an end is a failure, unless the end was seen before the abort.
void CudaIpcCommunicator::begin_work(const ipc::OpContext& context) {
  auto succeeded = std::make_shared<std::atomic<bool>>(false);
  auto reached = [group = resources_.group, signal_pad = resources_.signal_pad, context, succeeded,
                  number = ++works_] {
    if (succeeded->load()) return true;
    if (!ipc::reached(signal_pad.counter(group->rank()).ended.load(std::memory_order_acquire),
                      number))
      return false;
    if (signal_pad.aborted().load(std::memory_order_acquire) != 0) group->require_healthy(context);
    succeeded->store(true);
    return true;
  };
  work_ = std::make_shared<PendingWork>(
      PendingWork::WorkInfo{context.operation, context.call, context.deadline, std::move(reached)},
      awaited_);
  resources_.watchdog->add(work_);
}

std::shared_ptr<PendingWork> CudaIpcCommunicator::end_call(const ipc::OpContext& context,
                                                           std::function<bool()> query,
                                                           std::shared_ptr<void> exposed) {
  if (!work_) begin_work(context);
  const std::shared_ptr<PendingWork> work = work_;
  work->set_end(std::move(query), std::move(exposed));
  try {
    gpu().on(stream().device, [&](cuda::Api& api) {
      api.write_value(
          stream(),
          resources_.registered->base() + resources_.signal_pad.offset_of_ended(group().rank()),
          works_);
    });
  } catch (...) {
    end_call(std::current_exception());
    throw;
  }
  work_.reset();
  resources_.watchdog->free_returned();
  return work;
}

void CudaIpcCommunicator::end_call(std::exception_ptr error) {
  if (const std::shared_ptr<PendingWork> work = std::exchange(work_, nullptr))
    work->lose(std::move(error), true);
}

// Also finds work of calls that have failed on this rank, whose end is not marked.
bool CudaIpcCommunicator::stream_has_ended() noexcept {
  const auto deadline = ipc::Clock::now() + kStreamTimeout;
  try {
    return gpu().on(stream().device, [&](cuda::Api& api) {
      const Event end = api.create_event(stream().device);
      const std::shared_ptr<void> destroyed(nullptr, [&](void*) { api.destroy(end); });
      api.record(end, stream());
      while (!api.query(end)) {
        if (ipc::Clock::now() >= deadline) return false;
        std::this_thread::sleep_for(kPollInterval);
      }
      return true;
    });
  } catch (...) {  // the device is broken
    return false;
  }
}

std::exception_ptr CudaIpcCommunicator::close(ipc::Deadline deadline) {
  if (std::exchange(closed_, true)) return nullptr;
  std::exception_ptr unreported = resources_.watchdog->close(deadline);
  const bool stuck = resources_.watchdog->is_stuck();
  if (stuck) leak(resources_.watchdog);  // its threads go on
  abandoned_ = stuck || !stream_has_ended();
  if (abandoned_) {
    resources_.staging_buffer->abandon();
    resources_.registered->abandon();
    resources_.symmetric_memory->abandon_peer_segments();
  }
  resources_.staging_buffer.reset();
  resources_.registered.reset();
  return unreported;
}

}  // namespace pycollect::cuda_ipc
