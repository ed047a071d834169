// Scopes that make a device current, or relax a thread's capture mode, and restore the former
// state.
#pragma once
#include <optional>

#include "api.h"

namespace pycollect::cuda {

class DeviceGuard {
 public:
  explicit DeviceGuard(Api& api) : api_(api), former_(api.current_device()) {}
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard() {
    try {
      if (current_.value_or(former_) != former_) api_.restore_device(former_);
    } catch (...) {  // the device is broken, and the caller's next call reports it
    }
  }
  // The first call always sets the device: torch makes a device current without telling CUDA, so
  // CUDA's may differ from the former one.
  void use(Device device) {
    if (device == current_) return;
    api_.set_device(device);
    current_ = device;
  }

 private:
  Api& api_;
  const Device former_;
  std::optional<Device> current_ = {};  // none: only the former one is known
};

// Allows a thread to make calls that may synchronize while it or another thread captures a graph.
// They must not concern the streams of the capture.
class RelaxedCaptureMode {
 public:
  explicit RelaxedCaptureMode(Api& api)
      : api_(api), mode_(api.exchange_capture_mode(CaptureMode::relaxed)) {}
  ~RelaxedCaptureMode() {
    try {
      api_.exchange_capture_mode(mode_);
    } catch (...) {  // the device is broken
    }
  }
  RelaxedCaptureMode(const RelaxedCaptureMode&) = delete;
  RelaxedCaptureMode& operator=(const RelaxedCaptureMode&) = delete;

 private:
  Api& api_;
  const CaptureMode mode_;
};

// Allows a thread to use a device during captures. The device is made current because a new thread
// starts on device 0, which this process may not use.
class CaptureModeGuard {
 public:
  CaptureModeGuard(Api& api, Device device) : device_(api), mode_(api) { device_.use(device); }

 private:
  DeviceGuard device_;
  RelaxedCaptureMode mode_;
};

}  // namespace pycollect::cuda
