// ProfilerEvent: shows an operation of a group in torch's profiler, from its call until it has
// ended on any thread, with its name and inputs as torch's own backends do: "pycollect:all_reduce".
#pragma once
#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <memory>
#include <string>

namespace pycollect::dist {

class ProfilerEvent {
 public:
  // Begins an event. Without a profiler on this thread returns null, in a few ns.
  static std::shared_ptr<ProfilerEvent> begin(const char* operation, at::TensorList inputs);
  ProfilerEvent(at::StepCallbacks&& callbacks, const char* operation, at::TensorList inputs);
  // Ends the event. Destroys states of Python, so that it must be called without a mutex that the
  // holder of the GIL may wait for.
  ~ProfilerEvent();
  ProfilerEvent(const ProfilerEvent&) = delete;
  ProfilerEvent& operator=(const ProfilerEvent&) = delete;

 private:
  const std::string title_;  // must outlive record_: the profiler keeps no copy
  at::RecordFunction record_;
  const at::ThreadLocalState caller_;  // in which the profiler expects the end
};

}  // namespace pycollect::dist
