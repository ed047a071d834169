#include "gpu_work.h"

#include <chrono>
#include <thread>

#include "../plan/error.h"

namespace pycollect {

using cuda::CaptureModeGuard;

GpuWork::GpuWork(std::shared_ptr<GpuCalls> calls, PreparedCall prepared,
                 std::vector<std::shared_ptr<cuda::SharedEvent>> ends, bool captured, bool owned)
    : Work(prepared.results),
      calls_(std::move(calls)),
      ends_(std::move(ends)),
      captured_(captured),
      owned_(owned),
      prepared_(std::move(prepared)) {}

// Memory of other allocators may be reused on the current streams once its tensors are released.
GpuWork::~GpuWork() {
  try {
    if (!owned_ && !waited_) order_current_streams();
  } catch (...) {  // the device is broken
  }
}

void GpuWork::order_current_streams() {
  cuda::DeviceGuard device(calls_->api_);
  for (const auto& end : ends_) {
    const at::Device on(calls_->kind_, static_cast<c10::DeviceIndex>(end->event().device));
    device.use(end->event().device);
    calls_->api_.wait(calls_->runtime().current_stream(on), end->event());
  }
}

// Tensors are released at once: their memory is not reused before the side streams are done with
// it.
bool GpuWork::wait(std::optional<double> seconds) {
  require(!seconds || !captured_,
          "wait: the host cannot wait for a collective while a CUDA graph is captured; pass no "
          "timeout");
  if (seconds && !finished_within(*seconds)) return false;
  order_current_streams();
  PreparedCall done;  // released without the lock
  const std::lock_guard lock(mutex_);
  waited_ = true;
  std::swap(done, prepared_);
  return true;
}

bool GpuWork::is_completed() {
  if (captured_) return false;
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
