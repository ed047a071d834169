// What profiles show: calls on this thread as ranges, operations of groups as events.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <optional>
#include <string>

namespace pycollect {

// The profile of the thread that makes a call, for what ends later and on any thread. torch's
// profiler frees the events of a profile that has ended, and still writes into them if they end in
// its name.
class CallerProfile {
 public:
  // Whether a profiler of this thread takes such events. Costs a few ns without a profiler.
  static bool is_active();
  CallerProfile();  // of this thread

 private:
  friend class ProfileGuard;
  const at::RecordFunctionTLS callbacks_;
  const std::weak_ptr<c10::ThreadLocalDebugInfo> info_;
};

// Makes a caller's profile that of this thread, or none if it has ended. The guard must be brief:
// torch has no way to keep a profile from ending meanwhile.
class ProfileGuard {
 public:
  explicit ProfileGuard(const CallerProfile& caller);
  ~ProfileGuard();
  ProfileGuard(const ProfileGuard&) = delete;
  ProfileGuard& operator=(const ProfileGuard&) = delete;

 private:
  const at::RecordFunctionTLS callbacks_;
  const std::shared_ptr<c10::ThreadLocalDebugInfo> info_;
};

// The lifetime of a ProfilerRange on this thread is shown as a function of torch's profiler, such
// as "pycollect::all_reduce", and in CUDA builds as an NVTX range. Without a profiler it costs a
// few ns.
class ProfilerRange {
 public:
  explicit ProfilerRange(const char* call);  // in the profile of this thread
  // In the profile of the thread that made the call, which must outlive the range; none: in no
  // profile.
  ProfilerRange(const char* call, const std::optional<CallerProfile>& caller);
  ~ProfilerRange();
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;

 private:
  void record(const char* call);

  std::string name_;  // must outlive record_: the profiler keeps no copy
  std::optional<at::RecordFunction> record_;
  const CallerProfile* caller_ = nullptr;
};

// Begin and end an NVTX range. Do nothing in builds without CUDA.
void begin_range(const char* call);
void end_range();

// A ProfilerEvent shows an operation of a group in torch's profiler, from its call until it has
// ended on any thread, with its name and inputs as torch's own backends do: "pycollect:all_reduce".
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

}  // namespace pycollect
