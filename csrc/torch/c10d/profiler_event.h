// ProfilerEvent: shows an operation of a group in torch's profiler, from its call until it has
// ended on any thread, with its name and inputs as torch's own backends do: "pycollect:all_reduce".
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "../profiler_range.h"

namespace pycollect::dist {

class ProfilerEvent {
 public:
  // Begins an event. Without a profiler on this thread returns null, in a few ns.
  static std::shared_ptr<ProfilerEvent> begin(const char* operation, at::TensorList inputs);
  ProfilerEvent(const char* operation, at::TensorList inputs);
  // Ends the event. May destroy a profile that ends meanwhile, so that it must be called without a
  // mutex that the holder of the GIL may wait for.
  ~ProfilerEvent();
  ProfilerEvent(const ProfilerEvent&) = delete;
  ProfilerEvent& operator=(const ProfilerEvent&) = delete;

 private:
  const std::string title_;  // must outlive record_: the profiler keeps no copy
  at::RecordFunction record_;
  const CallerProfile caller_;
};

}  // namespace pycollect::dist
