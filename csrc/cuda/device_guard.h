// Scopes that make a device current, or set a thread's capture mode, and restore the former state.
#pragma once
#include "api.h"

namespace pycollect::cuda {

class DeviceGuard {
 public:
  explicit DeviceGuard(Api& api) : api_(api), former_(api.current_device()), current_(former_) {}
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard() {
    try {
      if (current_ != former_) api_.restore_device(former_);
    } catch (...) {  // the device is broken, and the caller's next call reports it
    }
  }
  Device former() const { return former_; }  // the device that was current before
  void use(Device device) {
    if (device == current_) return;
    api_.set_device(device);
    current_ = device;
  }

 private:
  Api& api_;
  const Device former_;
  Device current_;
};

// Allows a thread to make calls that may synchronize while other threads capture graphs. During a
// capture in global mode, only threads in thread-local mode, which this sets, may do so.
class ThreadCaptureMode {
 public:
  explicit ThreadCaptureMode(Api& api)
      : api_(api), mode_(api.exchange_capture_mode(CaptureMode::thread_local_only)) {}
  ~ThreadCaptureMode() {
    try {
      api_.exchange_capture_mode(mode_);
    } catch (...) {  // the device is broken
    }
  }
  ThreadCaptureMode(const ThreadCaptureMode&) = delete;
  ThreadCaptureMode& operator=(const ThreadCaptureMode&) = delete;

 private:
  Api& api_;
  const CaptureMode mode_;
};

// Allows a thread to use a device while other threads capture graphs. The device is made current
// because a new thread starts on device 0, which this process may not use.
class CaptureModeGuard {
 public:
  CaptureModeGuard(Api& api, Device device) : device_(api), mode_(api) { device_.use(device); }

 private:
  DeviceGuard device_;
  ThreadCaptureMode mode_;
};

}  // namespace pycollect::cuda
