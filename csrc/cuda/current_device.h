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

// Whoever works on a device whatever others capture meanwhile: its streams are under no capture,
// but one forbids calls that may synchronize to all threads that do not say so. The device is made
// current because a new thread's is the first, which this process may have no use for.
class Beside {
 public:
  Beside(Api& api, Device device)
      : api_(api), device_(api), mode_(api.exchange_capture_mode(CaptureMode::thread_local_only)) {
    device_.use(device);
  }
  ~Beside() {
    try {
      api_.exchange_capture_mode(mode_);
    } catch (...) {  // the device is broken
    }
  }
  Beside(const Beside&) = delete;
  Beside& operator=(const Beside&) = delete;

 private:
  Api& api_;
  CurrentDevice device_;
  const CaptureMode mode_;
};

}  // namespace pycollect::cuda
