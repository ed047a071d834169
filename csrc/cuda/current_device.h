// Makes devices current, and at the end the one that was.
#pragma once
#include "runtime.h"

namespace pycollect::cuda {

class CurrentDevice {
 public:
  explicit CurrentDevice(Runtime& runtime)
      : runtime_(runtime), before_(runtime.current_device()), now_(before_) {}
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice() {
    try {
      use(before_);
    } catch (...) {  // the device is broken, and the caller will hear of it at the next call
    }
  }
  void use(Device device) {
    if (device == now_) return;
    runtime_.set_device(device);
    now_ = device;
  }

 private:
  Runtime& runtime_;
  const Device before_;
  Device now_;
};

}  // namespace pycollect::cuda
