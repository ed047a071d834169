// Makes devices current, and at the end the one that was.
#pragma once
#include "api.h"

namespace pycollect::cuda {

class CurrentDevice {
 public:
  explicit CurrentDevice(Api& api) : api_(api), before_(api.current_device()), now_(before_) {}
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice() {
    try {
      if (now_ != before_) api_.restore_device(before_);
    } catch (...) {  // the device is broken, and the caller will hear of it at the next call
    }
  }
  void use(Device device) {
    if (device == now_) return;
    api_.set_device(device);
    now_ = device;
  }

 private:
  Api& api_;
  const Device before_;
  Device now_;
};

// Lets a thread work on a device while others capture graphs. A capture in the global mode forbids
// calls that may synchronize to every thread, except in thread-local mode, which this sets. The
// device is made current because a new thread starts on device 0, which this process may not use.
class CaptureModeGuard {
 public:
  CaptureModeGuard(Api& api, Device device)
      : api_(api), device_(api), mode_(api.exchange_capture_mode(CaptureMode::thread_local_only)) {
    device_.use(device);
  }
  ~CaptureModeGuard() {
    try {
      api_.exchange_capture_mode(mode_);
    } catch (...) {  // the device is broken
    }
  }
  CaptureModeGuard(const CaptureModeGuard&) = delete;
  CaptureModeGuard& operator=(const CaptureModeGuard&) = delete;

 private:
  Api& api_;
  CurrentDevice device_;
  const CaptureMode mode_;
};

}  // namespace pycollect::cuda
