#include "gpu_work.h"

#include <chrono>
#include <thread>

#include "../plan/error.h"

namespace pycollect {

using cuda::CaptureModeGuard;

GpuWork::GpuWork(std::shared_ptr<GpuCalls> calls, PreparedCall prepared,
                 std::vector<std::shared_ptr<cuda::SharedEvent>> ends, uint64_t capture, bool owned)
    : Work(prepared.results),
      calls_(std::move(calls)),
      ends_(std::move(ends)),
      capture_(capture),
      owned_(owned),
      prepared_(std::move(prepared)) {}

// Memory of other allocators may be reused on the current streams once its tensors are released.
GpuWork::~GpuWork() {
  try {
    if (owned_ || waited_) return;
    const std::vector<cuda::Stream> streams = current_streams();
    if (capture_of(streams) == capture_)
      order(streams);
    else  // the current streams cannot wait, so the memory is never reused
      static_cast<void>(new PreparedCall(std::move(prepared_)));
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
  PreparedCall done;  // released without the lock
  const std::lock_guard lock(mutex_);
  waited_ = true;
  std::swap(done, prepared_);
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
