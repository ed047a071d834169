// ProfilerRange: shows its lifetime on this thread in profiles, as a function of torch's profiler,
// such as "pycollect::all_reduce", and in CUDA builds as an NVTX range. Without a profiler it costs
// a few ns.
#pragma once
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

}  // namespace pycollect
